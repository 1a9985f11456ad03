"""Orders to a writer process: what to save, and where the staged state is."""

from __future__ import annotations

import logging
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from dcp.background.process.child import Child
from dcp.background.process.pickled_state import pack
from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.rank_state import RankState
from dcp.ranks.exchanges import pack_failure
from dcp.saving.save import Save
from dcp.staging.stager import StagedState
from dcp.storage.errors import CheckpointError

if TYPE_CHECKING:
    from dcp.background.writers import Payload
    from dcp.staging.arena import HostArena

__all__ = ["Sender"]

logger = logging.getLogger(__name__)


@dataclass
class _Sent:
    """The number by which the child knows an arena's mapping of a generation, and what was sent of the state
    in it."""

    key: int
    generation: int
    layout: int = 0
    columns: tuple[object, ...] = ()


class Sender:
    """Sends saves to one writer process, which keeps what does not change from one to the next: the mappings
    of arenas, and the form of the state in each (the views of its layout, its columns)."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._arenas: weakref.WeakKeyDictionary[HostArena, _Sent] = weakref.WeakKeyDictionary()
        self._next_key = 0

    def send(self, order: Save, payload: Payload, *, go: bool, place: str) -> None:
        """Send a save whose ``payload`` is done. What cannot be sent is sent as the save's failure, so that
        the other ranks learn of it. With ``go`` it may begin when those sent before have ended."""
        options, progress = order.options, order.options.progress
        body: dict[str, Any] = {
            "kind": "save",
            "serial": order.serial,
            "go": go,
            "place": place,
            "together": options.use_collectives,
            "on_columns": order.on_columns,
            "timeout_seconds": options.timeout_seconds,
            "retries": options.retries,
            "retry_pause_seconds": options.retry_pause_seconds,
            "progress": "report" if callable(progress) else bool(progress),
        }
        refused = dict(body)
        fds: list[int] = []
        part_fd = -1
        try:
            body["cwd"] = os.getcwd()  # noqa: PTH109 - travels as text
            sent = replace(
                order, seconds=order.seconds | payload.seconds, options=replace(options, progress=None)
            )
            body["order"] = pack(sent, "the save's storage, planner or features")
            part_fd = self._add_part(payload, body)
            fds = [part_fd, body.pop("mapping_fd")] if "mapping_fd" in body else [part_fd]
        except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
            self.forget()
            body = refused | {"refused": pack_failure(error)}
        try:
            self._child.send(body, fds)
        except Exception as error:
            logger.exception("a save could not be sent to the writer process")
            self.forget()
            self._child.send(refused | {"refused": pack_failure(error)})
        finally:
            if part_fd >= 0:
                os.close(part_fd)

    def forget(self) -> None:
        """Send everything with the next save: a save has failed, and with it perhaps the taking in of what
        it brought."""
        self._arenas.clear()

    def _add_part(self, payload: Payload, body: dict[str, Any]) -> int:
        """Say in ``body`` what the child does not know yet; returns a memory file with what is of this save
        alone (it may be larger than the 4 GiB that a message can hold)."""
        part = payload.done.result()
        if not isinstance(payload, StagedState) or payload.arena.fd is None:
            raise CheckpointError("the state was staged in memory that no other process sees")
        arena = payload.arena
        known = self._arenas.get(arena)
        if known is None or known.generation != arena.generation:
            self._next_key += 1
            known = self._arenas[arena] = _Sent(self._next_key, arena.generation)
            body |= {"mapping": arena.size_bytes, "mapping_fd": arena.fd}
        body["arena"] = known.key
        # a mapping that the child kept would keep the memory from being freed
        body["keep"] = [
            sent.key
            for each, sent in self._arenas.items()
            if not each.closed and each.generation == sent.generation
        ]
        if not isinstance(part, RankState):
            packed = pack(part, "the state dict", arena)
            return _memory_file(lambda file: file.write(packed))
        columns = (part.columns, part.replicated)
        # pickling 20,000 rows takes 7 ms of the training's time, comparing them 1
        if known.layout != payload.layout or not all(map(_same, columns, known.columns)):
            views = part.memory
            shapes = views.dtype_codes, views.shape_start, views.shape_values
            form = (payload.offsets, *shapes, *columns)
            body["form"] = pickle.dumps(form, pickle.HIGHEST_PROTOCOL)
            known.layout, known.columns = payload.layout, columns
        objects = list(part.objects)
        return _memory_file(lambda file: pickle.dump(objects, file, pickle.HIGHEST_PROTOCOL))


def _memory_file(fill: Callable[[BinaryIO], object]) -> int:
    """Make a memory file with what ``fill`` writes to it; the descriptor is the caller's."""
    memory = os.memfd_create("dcp-values", os.MFD_CLOEXEC)
    try:
        with os.fdopen(memory, "wb", closefd=False) as file:
            fill(file)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _same(mine: object, others: object) -> bool:
    """Tell whether columns are equal, by value."""
    if mine is others:
        return True
    if type(mine) is not type(others):
        return False
    if isinstance(mine, np.ndarray) and isinstance(others, np.ndarray):
        return np.array_equal(mine, others)
    if isinstance(mine, (SaveColumns, SaveObjects)):
        return all(_same(getattr(mine, item.name), getattr(others, item.name)) for item in fields(mine))
    return bool(mine == others)
