"""Rendezvous of the writer processes of all ranks, which depends on no trainer.

Rank 0's writer hosts a key-value store of their own. Its trainer binds the socket, so that the address can go
round while the writers still start; the trainers give it each other through the store that they share, and
hand it on. Waits poll: a blocking wait would hold the client's lock, which the training's own use of the
store needs, so the store given here should be a client of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from dcp.ranks.collectives import Ranks
from dcp.ranks.exchanges import Presence
from dcp.saving.save import agreeing_seconds
from dcp.storage.errors import CollectiveTimeoutError

logger = logging.getLogger(__name__)

HOST_VARIABLE = "DCP_WRITER_HOST"
"""Set on rank 0: the name or address by which other hosts reach it, where what is found out is not right."""

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_LONGEST_PAUSE_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
"""Time that the host of the writers' store stays for the others, once their trainers are gone."""


class Address(NamedTuple):
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
        store.set("address", msgpack.packb(address))
        return address, listener
    return Address(*msgpack.unpackb(_read(store, "address", 0, deadline, check))), None


def own_client(store: Any) -> Any:
    """Make another connection to the same store, where its kind has that; else the store."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


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


# -- in the writer processes ---------------------------------------------------------------------------------


class Meeting:
    """The writers' own process group, made once all trainers have said where it meets."""

    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.rank, self.world_size, self._timeout_seconds = rank, world_size, timeout_seconds
        self._address: Address | None = None
        self._listener: int | None = None
        self._informed = threading.Event()
        self._joining = threading.Lock()
        self._needed = True
        self._presence: Presence | None = None
        self._store: Store | None = None
        self._failure: CollectiveTimeoutError | None = None

    def invite(self, address: Address, listener_fd: int | None) -> None:
        """Note where the writers meet, and the socket that listens there, on rank 0; it is taken."""
        self._address, self._listener = address, listener_fd
        self._informed.set()

    def expect_nothing_more(self, *, needed: bool) -> bool:
        """Note that the trainer is gone, and what it has sent is all; the group is ``needed`` for
        one. Whether the main thread is just joining one that is not."""
        self._needed = needed
        self._informed.set()
        return not needed and self._store is None and self._joining.locked()

    def ranks(self, timeout_seconds: float, abort: threading.Event) -> Ranks:
        """Return the ranks of one save; joins the group before the first."""
        self._join()
        bound = timeout_seconds - agreeing_seconds(timeout_seconds)
        return Ranks(use_dist=self.world_size > 1, timeout_seconds=bound, abort=abort)

    def join_early(self) -> None:
        """Join while there is nothing else to do; a failure is raised by the next save."""
        try:
            self._join()
        except CollectiveTimeoutError as error:
            logger.warning("%s", error)

    def _join(self) -> None:
        if self.world_size == 1 or self._store is not None:
            return
        if self._failure is not None:
            raise self._failure
        with self._joining:
            bound = self._timeout_seconds - agreeing_seconds(self._timeout_seconds)
            deadline = time.monotonic() + bound
            informed = self._informed.wait(bound)
            address = self._address
            if address is None or not self._needed:
                why = "their trainers ended before" if informed else "their trainers did not all start them"
                raise CollectiveTimeoutError(
                    f"the writer processes did not meet: {why}. Resume from the last committed checkpoint."
                )
            if address.loopback:  # a host name that does not resolve must not matter then
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            left = max(1.0, deadline - time.monotonic())
            try:
                store = _own_store(address, self._listener, left)
                self._presence = Presence(store, self.rank, self.world_size, ["meeting"])
                self._presence.show()
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timedelta(seconds=left),
                )
            except (RuntimeError, OSError) as error:
                missing = self._missing()
                self._failure = CollectiveTimeoutError(
                    f"the writer process of rank {self.rank} could not reach that of rank "
                    f"{', '.join(map(str, missing))} at {address.host}:{address.port}: {error}",
                    ranks=missing,
                )
                raise self._failure from error
            self._store = store

    def _missing(self) -> list[int]:
        """List the ranks whose writers are not at the store; rank 0 where it is gone."""
        try:
            if self._presence is not None:
                return self._presence.missing(0.0)
        except RuntimeError as error:
            logger.debug("the writers' store is gone: %s", error)
        return [0]

    def part(self) -> None:
        """Let the host of the store wait for the others, a while, before it ends without a trainer."""
        if self._store is None:
            return
        deadline = time.monotonic() + _FAREWELL_SECONDS
        try:
            gone = self._store.add("gone", 1)
            while self.rank == 0 and gone < self.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = self._store.add("gone", 0)
        except RuntimeError as error:
            logger.debug("the writers' store is gone already: %s", error)


def _own_store(address: Address, listener_fd: int | None, timeout_seconds: float) -> Store:
    """Connect to the writers' store; it is hosted here where ``listener_fd`` is given.

    Raises ConnectionRefusedError where its host is gone: it listened before anybody knew the address, and
    the store's client would try again until its timeout.
    """
    if listener_fd is None:
        try:
            socket.create_connection(address[:2], timeout_seconds).close()
        except ConnectionRefusedError:
            raise
        except OSError as error:  # the client says more of it
            logger.debug("the writers' store: %s", error)
    return TCPStore(
        address.host,
        address.port,
        is_master=listener_fd is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener_fd,
    )
