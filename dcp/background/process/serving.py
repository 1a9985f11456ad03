"""Main loop of a writer process: takes saves from its trainer, carries them out in order, reports."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store

from dcp.background.error_codec import error_to_data
from dcp.background.process import pickled_state
from dcp.background.process.rendezvous import Address, own_store
from dcp.background.process.wire import Connection, Message
from dcp.background.writers import RefusedWriter, Staged
from dcp.engines import refused_save
from dcp.features.plan_cache import PlanCache, remembering
from dcp.planners.columns import SaveColumns
from dcp.planners.rank_state import RankState
from dcp.progress import Progress, ProgressCallback
from dcp.ranks.collectives import Ranks
from dcp.ranks.exchanges import Presence, RankFailedError, decode_failure
from dcp.saving.save import Save, SaveOptions, agreeing_seconds
from dcp.storage.errors import CollectiveTimeoutError, WriterProcessError
from dcp.storage.tensors import LocalMemory, torch_dtype

__all__ = ["WriterLoop"]

logger = logging.getLogger(__name__)

_FAREWELL_SECONDS = 5.0
"""Time that the host of the writers' store stays for the others, once their trainers are gone."""


@dataclass
class _ReceivedSave:
    body: dict[str, Any]
    fds: list[int]
    abort: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def serial(self) -> int:
        return int(self.body["serial"])

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class WriterLoop:
    """Saves run in the main thread, as they would in a program of their own; another thread receives."""

    def __init__(self, connection: Connection, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._connection = connection
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saves: dict[int, _ReceivedSave] = {}
        self._alone = False
        self._meeting = _Meeting(rank, world_size, timeout_seconds)
        self._memory = _TrainerMemory()
        self._cache = PlanCache()

    def run(self) -> None:
        """Serve until the trainer closes or ends; what it has sent by then is finished."""
        torch.set_num_threads(1)
        threading.Thread(target=self._receive, name="dcp-writer-receive", daemon=True).start()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds the staged copy
        if self._alone:
            self._meeting.part()

    # -- receiving -------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                self._take(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing more is heard of the trainer
            logger.error("the connection to the trainer broke: %s: %s", type(error).__name__, error)
        finally:
            self._go_on_alone()

    def _go_on_alone(self) -> None:
        """Carry out the saves received, without a trainer to say that all ranks are ready for them."""
        self._alone = True
        if self._meeting.expect_nothing_more(needed=bool(self._saves)):
            os._exit(0)  # the main thread waits for the other writers, for no save
        for save in list(self._saves.values()):
            save.go.set()
        self._tasks.put(None)

    def _take(self, message: Message) -> None:
        body = message.body
        kind = body["kind"]
        if kind == "save":
            save = _ReceivedSave(body, message.fds)
            if body["go"]:
                save.go.set()
            self._saves[save.serial] = save
            self._tasks.put(lambda: self._carry_out(save))
        elif kind == "join":
            self._meeting.invite(Address(**body["address"]), message.fds)
            self._tasks.put(self._meeting.join_early)
        elif kind == "close":
            self._tasks.put(None)
        elif (known := self._saves.get(body["serial"])) is not None:
            (known.go if kind == "go" else known.abort).set()

    # -- saving ----------------------------------------------------------------------------------------------

    def _carry_out(self, save: _ReceivedSave) -> None:
        save.go.wait()
        reply: dict[str, Any] = {"kind": "done", "serial": save.serial}
        try:
            reply |= self._run(save)
        except BaseException as error:  # noqa: BLE001 - it is reported, and raised in the trainer
            reply |= {"ok": False, "error": error_to_data(error), "broken": self._breaks(error)}
            if self._alone:
                logger.error("save %s failed: %s", save.body["place"], error)
        finally:
            save.close_fds()
            del self._saves[save.serial]
        while not self._alone:
            try:
                self._connection.send(reply)
                return
            except BlockingIOError:  # the trainer reads again once its progress callback has returned
                continue
            except (BrokenPipeError, ConnectionResetError):
                return
            except OSError:  # no descriptor is left, and it is too long for a packet
                if reply.get("metadata") is None:
                    raise
                reply["metadata"] = None

    def _run(self, save: _ReceivedSave) -> dict[str, Any]:
        body = save.body
        payload: Callable[[], RankState | dict[str, Any]]
        try:
            # first: the saves to come build on it, whatever becomes of this one
            payload = self._memory.payload(body, save.fds)
            if "refused" in body:
                raise decode_failure(body["refused"])
            os.chdir(body["cwd"])
            order: Save = pickled_state.unpack(body["order"])
        except Exception as error:  # noqa: BLE001 - raised in the save's first step, on all ranks
            order, payload = _refused(error, body), Staged.failed(error).done.result
        order = replace(order, options=replace(order.options, progress=self._progress(save)))
        ranks = self._meeting.ranks(order.options.timeout_seconds, save.abort)
        metadata, outcome = remembering(order, self._cache).run(payload, ranks)
        ours = order.storage is not None  # the trainer can read the manifest itself
        return {
            "ok": True,
            "outcome": asdict(outcome),
            "metadata": None if ours else pickle.dumps(metadata),
        }

    def _progress(self, save: _ReceivedSave) -> bool | ProgressCallback | None:
        if save.body["progress"] != "report":
            return bool(save.body["progress"])

        def report(progress: Progress) -> None:
            self._connection.offer({"kind": "progress", "serial": save.serial, "progress": asdict(progress)})

        return report

    def _breaks(self, error: BaseException) -> bool:
        """Tell if the writers may be out of step after ``error``, which ends a save not alike on all."""
        if self._meeting.world_size == 1:
            return False
        return isinstance(error, CollectiveTimeoutError) or not isinstance(error, RankFailedError)


def _refused(error: Exception, body: dict[str, Any]) -> Save:
    """Make a save in the place of that of ``body``, which takes the same steps as the others."""
    options = SaveOptions(
        use_collectives=body["together"],
        timeout_seconds=body["timeout_seconds"],
        retries=body["retries"],
        retry_pause_seconds=body["retry_pause_seconds"],
    )
    return refused_save(RefusedWriter(error), options, body["serial"], on_columns=body["on_columns"])


class _Meeting:
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

    def invite(self, address: Address, fds: list[int]) -> None:
        self._address, self._listener = address, fds[0] if fds else None
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
                store = own_store(address, self._listener, left)
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


class _TrainerMemory:
    """The trainer's host arenas as this process sees them, with the form of the state that is staged in each:
    its tensors, columns and replicated rows."""

    def __init__(self) -> None:
        self._arenas: dict[int, torch.Tensor] = {}
        self._forms: dict[int, tuple[LocalMemory, SaveColumns, np.ndarray[Any, np.dtype[np.uint8]]]] = {}

    def payload(self, body: dict[str, Any], fds: list[int]) -> Callable[[], RankState | dict[str, Any]]:
        """Take in arenas and forms that came with a save; the result gives its staged state.

        Where that fails nothing is kept, so that no later save is mixed up with what an earlier one brought.
        """
        try:
            for known in self._arenas.keys() - body.get("keep", self._arenas.keys()):
                del self._arenas[known]
                self._forms.pop(known, None)
            if "mapping" in body:
                self._arenas[body["arena"]] = pickled_state.map_memory(fds[1], body["mapping"])
            if "form" in body:
                self._forms[body["arena"]] = _form(self._arenas[body["arena"]], body["form"])
        except BaseException:
            self._arenas.clear()
            self._forms.clear()
            raise
        return partial(self._state, body, fds)

    def _state(self, body: dict[str, Any], fds: list[int]) -> RankState | dict[str, Any]:
        arena, form = self._arenas.get(body["arena"]), self._forms.get(body["arena"])
        with os.fdopen(fds[0], "rb", closefd=False) as file:
            file.seek(0)
            if arena is not None and not body["on_columns"]:
                state: dict[str, Any] = pickled_state.unpack(file.read(), arena)
                return state
            if form is not None:
                sources, columns, replicated = form
                return RankState(columns, sources, pickle.load(file), replicated)
        raise WriterProcessError(
            "what this save builds on was lost with the one before it; the next save brings all of it"
        )


def _form(arena: torch.Tensor, data: bytes) -> tuple[LocalMemory, SaveColumns, Any]:
    """View the tensors of a layout, by their places in ``arena``, dtypes and shapes; and what goes with
    them."""
    offsets, dtype_codes, shape_start, shape_values, columns, replicated = pickle.loads(data)
    extents = shape_values.tolist()
    shapes = [tuple(extents[begin:end]) for begin, end in pairwise(shape_start.tolist())]
    views = [
        pickled_state.tensor_view(arena, offset, shape, torch_dtype(code))
        for offset, shape, code in zip(offsets.tolist(), shapes, dtype_codes.tolist(), strict=True)
    ]
    return LocalMemory.of(views), columns, replicated
