"""Main loop of a writer process: takes saves from its trainer, carries them out in order, reports."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dcp.background.link import Connection
from dcp.background.rendezvous import Address, Meeting
from dcp.background.transfer import TrainerMemory, error_to_data, unpack
from dcp.background.writers import RefusedWriter, Staged
from dcp.engines import refused_save
from dcp.features.plan_cache import PlanCache, remembering
from dcp.planners.rank_state import RankState
from dcp.progress import Progress, ProgressCallback
from dcp.ranks.exchanges import RankFailedError, decode_failure
from dcp.saving.save import Save, SaveOptions
from dcp.storage.errors import CollectiveTimeoutError

logger = logging.getLogger(__name__)


@dataclass
class _ReceivedSave:
    body: dict[str, Any]
    fds: list[int]
    abort: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


class WriterLoop:
    """Saves run in the main thread, as they would in a program of their own; another thread receives."""

    def __init__(self, connection: Connection, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._connection = connection
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saves: dict[int, _ReceivedSave] = {}
        self._alone = False
        self._meeting = Meeting(rank, world_size, timeout_seconds)
        self._memory = TrainerMemory()
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
                self._take(*message)
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

    def _take(self, body: dict[str, Any], fds: list[int]) -> None:
        kind = body["kind"]
        if kind == "save":
            save = self._saves[body["serial"]] = _ReceivedSave(body, fds)
            if body["go"]:
                save.go.set()
            self._tasks.put(lambda: self._carry_out(save))
        elif kind == "join":
            self._meeting.invite(Address(*body["address"]), fds[0] if fds else None)
            self._tasks.put(self._meeting.join_early)
        elif kind == "close":
            self._tasks.put(None)
        elif (known := self._saves.get(body["serial"])) is not None:
            (known.go if kind == "go" else known.abort).set()

    # -- saving ----------------------------------------------------------------------------------------------

    def _carry_out(self, save: _ReceivedSave) -> None:
        save.go.wait()
        reply: dict[str, Any] = {"kind": "done", "serial": save.body["serial"]}
        try:
            reply |= self._run(save)
        except BaseException as error:  # noqa: BLE001 - it is reported, and raised in the trainer
            reply |= {"ok": False, "error": error_to_data(error), "broken": self._breaks(error)}
            if self._alone:
                logger.error("save %s failed: %s", save.body["place"], error)
        finally:
            for fd in save.fds:
                os.close(fd)
            del self._saves[save.body["serial"]]
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
            order: Save = unpack(body["order"])
        except Exception as error:  # noqa: BLE001 - raised in the save's first step, on all ranks
            options, on_columns = SaveOptions(**body["options"]), body["on_columns"]
            order = refused_save(RefusedWriter(error), options, body["serial"], on_columns=on_columns)
            payload = Staged.failed(error).done.result
        order = replace(order, options=replace(order.options, progress=self._progress(body)))
        ranks = self._meeting.ranks(order.options.timeout_seconds, save.abort)
        metadata, outcome = remembering(order, self._cache).run(payload, ranks)
        ours = order.storage is not None  # the trainer can read the manifest itself
        return {
            "ok": True,
            "outcome": asdict(outcome),
            "metadata": None if ours else pickle.dumps(metadata),
        }

    def _progress(self, body: dict[str, Any]) -> bool | ProgressCallback:
        def report(progress: Progress) -> None:
            self._connection.offer(
                {"kind": "progress", "serial": body["serial"], "progress": asdict(progress)}
            )

        return report if body["progress"] == "report" else bool(body["progress"])

    def _breaks(self, error: BaseException) -> bool:
        """Tell if the writers may be out of step after ``error``, which ends a save not alike on all."""
        if self._meeting.world_size == 1:
            return False
        return isinstance(error, CollectiveTimeoutError) or not isinstance(error, RankFailedError)
