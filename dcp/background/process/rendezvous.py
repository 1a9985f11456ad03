"""Rendezvous of the writer processes of all ranks, which depends on no trainer.

Rank 0's writer hosts a key-value store of their own. Its trainer binds the socket, so that the address can go
round while the writers still start; the trainers tell it each other through the store that they share, and
hand it on. Waits poll: a blocking wait would hold the client's lock, which the training's own use of the
store needs, so the store given here should be a client of its own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from dcp.storage.errors import CollectiveTimeoutError

__all__ = ["HOST_VARIABLE", "Address", "meet", "own_client", "own_store"]

HOST_VARIABLE = "DCP_WRITER_HOST"
"""Set on rank 0: the name or address by which other hosts reach it, where what is found out is not right."""

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_LONGEST_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Address:
    """Address of the writers' store; ``loopback`` if all ranks share one network namespace."""

    host: str
    port: int
    loopback: bool


def meet(
    store: Any, rank: int, world_size: int, *, timeout_seconds: float, check: Callable[[], None]
) -> tuple[Address, socket.socket | None]:
    """Agree on the address with the other trainers; rank 0 also gets the socket that listens there.

    ``store`` is for this meeting alone (a prefix that was not used before). ``check`` is called while
    waiting, and raises where waiting has become useless. Raises CollectiveTimeoutError that names the ranks
    that did not come.
    """
    deadline = time.monotonic() + timeout_seconds
    store.set(f"host/{rank}", _namespace())
    if rank == 0:
        hosts = {_read(store, f"host/{other}", other, deadline, check) for other in range(world_size)}
        loopback = len(hosts) == 1
        listener = _listen(loopback)
        host = _LOOPBACK if loopback else _host_name()
        address = Address(host, listener.getsockname()[1], loopback)
        store.set("address", msgpack.packb([address.host, address.port, address.loopback]))
        return address, listener
    found = _read(store, "address", 0, deadline, check)
    return Address(*msgpack.unpackb(found)), None


def own_client(store: Any) -> Any:
    """Make another connection to the same store, where its kind has that; else the store."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


def own_store(address: Address, listener_fd: int | None, timeout_seconds: float) -> Store:
    """Connect a writer process to the writers' store; it is hosted here where ``listener_fd`` is given (and
    taken).

    Raises ConnectionRefusedError where its host is gone: it listened before anybody knew the address, and
    the store's client would try again until its timeout.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if listener_fd is None:
        _see_that_it_listens(address, timeout_seconds)
        return TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return TCPStore(
        address.host,
        address.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener_fd,
    )


def _see_that_it_listens(address: Address, timeout_seconds: float) -> None:
    try:
        socket.create_connection((address.host, address.port), timeout_seconds).close()
    except ConnectionRefusedError:
        raise
    except OSError:  # the client says more of it
        return


def _read(store: Any, key: str, rank: int, deadline: float, check: Callable[[], None]) -> bytes:
    """Wait for the value of ``key``, which ``rank`` sets."""
    pause = 0.001
    while not store.check([key]):
        check()
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"rank {rank} has not started its writer process in time: it has died, or does not save. "
                "All ranks of the process group must take part in a save.",
                ranks=[rank],
            )
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.5)
    value: bytes = store.get(key)
    return value


def _namespace() -> bytes:
    """Return what is equal on two ranks if they reach each other by the loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    net = os.stat("/proc/self/ns/net")  # noqa: PTH116 - what the link points to is no path
    return b"%s/%d/%d" % (boot, net.st_dev, net.st_ino)


def _listen(loopback: bool) -> socket.socket:
    if loopback:
        return socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _host_name() -> str:
    """Return the name by which other hosts reach this one, the host of rank 0 of the group."""
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named
    master = os.environ.get("MASTER_ADDR")
    # MASTER_ADDR is where global rank 0 is, which need not be rank 0 of this group
    if master and dist.is_initialized() and dist.get_rank() == 0:
        return master
    return socket.getfqdn()
