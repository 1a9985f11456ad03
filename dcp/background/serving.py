"""Main loop of a writer process: receive saves, run them in order, report results.

The writers of all ranks share a process group over a store hosted by rank 0's writer, independent of the
trainers.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from dcp.background.link import LOOPBACK, Connection
from dcp.background.transfer import TrainerMemory, error_to_data, unpack
from dcp.background.writers import RefusedWriter, raise_error
from dcp.engines.run import refused_save
from dcp.features.plan_cache import PlanCache, remembering
from dcp.planners.rank_state import RankState
from dcp.progress import Progress, ProgressCallback
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import Presence, RankFailedError, decode_failure
from dcp.saving.save import Save, SaveOptions, agreeing_seconds
from dcp.storage.errors import CollectiveTimeoutError

logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 5.0
"""Time that the host of the store waits for the other writers after their trainers have ended."""


class WriterLoop:
    """Loop of a writer process. Saves run in the main thread; another thread receives messages."""

    def __init__(self, connection: Connection, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._connection = connection
        self._rank, self._world_size, self._timeout_seconds = rank, world_size, timeout_seconds
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saves: dict[int, dict[str, threading.Event]] = {}  # messages of the trainer: "go", "abort"
        self._alone = False
        self._memory = TrainerMemory()
        self._cache = PlanCache()
        # address of the writers' store, and on rank 0 its listening socket
        self._meeting: tuple[tuple[str, int], int | None] | None = None
        self._informed = threading.Event()
        self._joining = threading.Lock()
        self._is_needed = True
        self._store: Store | None = None
        self._failure: CollectiveTimeoutError | None = None

    def run(self) -> None:
        """Serve until the trainer closes or ends, and finish received saves."""
        torch.set_num_threads(1)
        threading.Thread(target=self._receive, name="dcp-writer-receive", daemon=True).start()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # releases the staged copy
        if self._alone and self._store is not None:
            self._part(self._store)

    # -- receiving -------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                self._take(*message)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing more is heard of the trainer
            logger.error("lost the connection to the trainer: %s: %s", type(error).__name__, error)
        finally:
            self._go_on_alone()

    def _go_on_alone(self) -> None:
        """Run the received saves without the trainer's confirmation that all ranks are ready."""
        self._alone = True
        self._is_needed = bool(self._saves)
        self._informed.set()
        if not self._is_needed and self._store is None and self._joining.locked():
            os._exit(0)  # without saves, do not wait for the other writers to connect
        for said in list(self._saves.values()):
            said["go"].set()
        self._tasks.put(None)

    def _take(self, body: dict[str, Any], fds: list[int]) -> None:
        kind = body["kind"]
        if kind == "save":
            said = self._saves[body["serial"]] = {"go": threading.Event(), "abort": threading.Event()}
            if body["go"]:
                said["go"].set()
            self._tasks.put(partial(self._carry_out, body, fds, **said))
        elif kind == "join":
            host, port = body["address"]
            self._meeting = (host, port), fds[0] if fds else None
            self._informed.set()
            self._tasks.put(self._join_early)
        elif kind == "close":
            self._tasks.put(None)
        elif (known := self._saves.get(body["serial"])) is not None:
            known[kind].set()

    # -- saving ----------------------------------------------------------------------------------------------

    def _carry_out(
        self, body: dict[str, Any], fds: list[int], go: threading.Event, abort: threading.Event
    ) -> None:
        go.wait()
        reply: dict[str, Any] = {"kind": "done", "serial": body["serial"]}
        try:
            reply |= self._run(body, fds, abort)
        except BaseException as error:  # noqa: BLE001 - it is reported, and raised in the trainer
            # different errors may leave the writers in different steps
            is_alike = isinstance(error, RankFailedError) and not isinstance(error, CollectiveTimeoutError)
            broken = self._world_size > 1 and not is_alike
            reply["ending"] = {"error": error_to_data(error), "broken": broken}
            if self._alone:
                logger.error("save %s failed: %s", body["place"], error)
        finally:
            for fd in fds:
                os.close(fd)
            del self._saves[body["serial"]]
        while not self._alone:
            try:
                self._connection.send(reply)
                return
            except BlockingIOError:  # the trainer is busy in its progress callback
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
            except OSError:  # out of file descriptors, and too long for a packet
                if reply.get("metadata") is None:
                    raise
                reply["metadata"] = None

    def _run(self, body: dict[str, Any], fds: list[int], abort: threading.Event) -> dict[str, Any]:
        payload: Callable[[], RankState | dict[str, Any]]
        try:
            # before other checks, because later saves build on this state
            payload = self._memory.payload(body, fds)
            if "refused" in body:
                raise decode_failure(body["refused"])
            os.chdir(body["cwd"])
            order: Save = unpack(body["order"])
        except Exception as error:  # noqa: BLE001 - raised in the save's first step, on all ranks
            options, on_columns = SaveOptions(**body["options"]), body["on_columns"]
            order = refused_save(RefusedWriter(error), options, body["serial"], on_columns=on_columns)
            payload = partial(raise_error, error)
        order = replace(order, options=replace(order.options, progress=self._progress(body)))
        self._join()
        bound = order.options.timeout_seconds - agreeing_seconds(order.options.timeout_seconds)
        ranks = Ranks(use_dist=self._world_size > 1, timeout_seconds=bound, abort=abort)
        metadata, outcome = remembering(order, self._cache).run(payload, ranks)
        ours = order.storage is not None  # the trainer can read the manifest itself
        return {
            "ending": {"saved": True, "save_id": outcome.save_id},
            "outcome": asdict(outcome),
            "metadata": None if ours else pickle.dumps(metadata),
        }

    def _progress(self, body: dict[str, Any]) -> bool | ProgressCallback:
        def report(progress: Progress) -> None:
            self._connection.offer(
                {"kind": "progress", "serial": body["serial"], "progress": asdict(progress)}
            )

        return report if body["progress"] == "report" else bool(body["progress"])

    # -- the writers' own group ------------------------------------------------------------------------------

    def _join_early(self) -> None:
        """Join the group while idle; the next save raises a failure."""
        try:
            self._join()
        except CollectiveTimeoutError as error:
            logger.warning("%s", error)

    def _join(self) -> None:
        """Join the group before the first save, after all trainers have sent its address."""
        if self._world_size == 1 or self._store is not None:
            return
        if self._failure is not None:
            raise self._failure
        with self._joining:
            bound = self._timeout_seconds - agreeing_seconds(self._timeout_seconds)
            deadline = time.monotonic() + bound
            informed = self._informed.wait(bound)
            if self._meeting is None or not self._is_needed:
                why = "the trainer ended first" if informed else "some ranks did not start theirs"
                raise CollectiveTimeoutError(
                    f"the writer processes could not connect to each other: {why}. Resume from the last "
                    "committed checkpoint."
                )
            address, listener_fd = self._meeting
            if address[0] == LOOPBACK:  # avoids a host name lookup
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            presence: Presence | None = None
            try:
                store = _own_store(address, listener_fd, left)
                presence = Presence(store, self._rank, self._world_size, ["meeting"])
                presence.show()
                dist.init_process_group(
                    "gloo", store=store, rank=self._rank, world_size=self._world_size, timeout=left
                )
            except (RuntimeError, OSError) as error:
                missing = [0]  # default if the store has failed
                if presence is not None:
                    with suppress(RuntimeError):
                        missing = presence.missing(0.0)
                self._failure = CollectiveTimeoutError(
                    f"the writer process of rank {self._rank} could not connect to the writer process of "
                    f"rank {', '.join(map(str, missing))} at {address[0]}:{address[1]}: {error}",
                    ranks=missing,
                )
                raise self._failure from error
            self._store = store

    def _part(self, store: Store) -> None:
        """Wait for other writers before the host of the store ends without a trainer."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        try:
            gone = store.add("gone", 1)
            while self._rank == 0 and gone < self._world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = store.add("gone", 0)
        except RuntimeError as error:
            logger.debug("the rendezvous store of the writer processes has ended: %s", error)


def _own_store(address: tuple[str, int], listener_fd: int | None, timeout: timedelta) -> Store:
    """Connect to the writers' store, hosted here with ``listener_fd``.

    Raises ConnectionRefusedError if the host is dead; torch's client would retry until its timeout.
    """
    if listener_fd is None:
        try:
            socket.create_connection(address, timeout.total_seconds()).close()
        except ConnectionRefusedError:
            raise
        except OSError as error:  # the TCPStore client below raises a better error
            logger.debug("rendezvous store of the writer processes: %s", error)
    return TCPStore(
        *address,
        is_master=listener_fd is not None,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener_fd,
    )
