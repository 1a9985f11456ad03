"""What a trainer tells its writer process about a save: the order, and where the staged state is."""

from __future__ import annotations

import logging
import os
import pickle
import weakref
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dcp.background.error_codec import plain_error
from dcp.background.process import pickled_state
from dcp.background.process.child import Child
from dcp.background.worker import Payload
from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.saving.engine import SaveOrder
from dcp.staging.stager import StagedState
from dcp.storage.errors import CheckpointError
from dcp.storage.tensors import dtype_code

if TYPE_CHECKING:
    from dcp.staging.memory.arena import HostArena

__all__ = ["Sender"]

logger = logging.getLogger(__name__)

_INLINE_BYTES = 1 << 20
"""Values beyond it travel in a memory file, which may be larger than the 4 GiB that a message can hold."""


class Sender:
    """Sends saves to one writer process, which keeps what does not change from one to the next: the mappings
    of arenas, the views of a layout, the columns."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._arenas: dict[int, tuple[weakref.ref[HostArena], int]] = {}
        self._layouts: dict[int, int] = {}
        self._gone: list[int] = []
        self._next_key = 0
        self._columns: tuple[SaveColumns, npt.NDArray[np.uint8]] | None = None

    def send(
        self,
        order: SaveOrder,
        payload: Payload,
        *,
        go: bool,
        place: str,
    ) -> None:
        """Send a save whose ``payload`` is done. What cannot be sent is sent as the save's failure, so that
        the other ranks learn of it. With ``go`` it may begin when those sent before have ended."""
        options, progress = order.options, order.options.progress
        body: dict[str, Any] = {
            "kind": "save",
            "serial": order.serial,
            "go": go,
            "place": place,
            "together": options.use_collectives,
            "on_columns": order.engine.on_columns,
            "timeout_seconds": options.timeout_seconds,
            "progress": "report" if callable(progress) else bool(progress),
        }
        fds: list[int] = []
        own_fds: list[int] = []
        try:
            body["cwd"] = os.getcwd()  # noqa: PTH109 - travels as text
            seconds = order.seconds | getattr(payload, "seconds", {})
            sent = replace(order, seconds=seconds, options=replace(options, progress=None))
            body["order"] = pickled_state.pack(sent, "the save's storage or planner").data
        except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
            body["refused"] = plain_error(error)
        else:
            try:
                self._add_state(payload, body, fds, own_fds)
            except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
                body["staging_error"] = plain_error(error)
        try:
            self._child.send(body, fds)
        except Exception as error:
            logger.exception("a save could not be sent to the writer process")
            self.forget()
            self._child.send(_refusal(body, error))
        finally:
            for fd in own_fds:
                os.close(fd)

    def forget(self) -> None:
        """Send everything with the next save: a save has failed, and with it perhaps the taking in of what
        it brought."""
        self._gone += self._arenas
        self._arenas.clear()
        self._layouts.clear()
        self._columns = None

    def _add_state(self, payload: Payload, body: dict[str, Any], fds: list[int], own_fds: list[int]) -> None:
        staged = payload.done.result()
        if isinstance(payload, StagedState):
            self._add_columns(payload, body, fds, own_fds)
            return
        if not isinstance(staged, dict):
            raise CheckpointError(f"a {type(staged).__name__} is no staged state that can leave the process")
        packed = pickled_state.pack(staged, "the state dict")
        if packed.size_bytes:
            own_fds.append(pickled_state.write_tensors(packed))
            fds.append(own_fds[0])
        body["state_bytes"] = packed.size_bytes
        if len(packed.data) <= _INLINE_BYTES:
            body["state"] = packed.data
            return
        own_fds.append(pickled_state.write_file(lambda file: file.write(packed.data)))
        body["state_fd"] = len(fds)
        fds.append(own_fds[-1])

    def _add_columns(
        self, staged: StagedState, body: dict[str, Any], fds: list[int], own_fds: list[int]
    ) -> None:
        local = staged.local
        body["forget"] = self._forget_arenas()
        key = self._add_arena(staged.arena, body, fds)
        objects = list(local.objects)
        if sum(len(value.blob) for value in objects) <= _INLINE_BYTES:
            body["objects"] = pickle.dumps(objects, pickle.HIGHEST_PROTOCOL)
        else:
            own_fds.append(
                pickled_state.write_file(lambda file: pickle.dump(objects, file, pickle.HIGHEST_PROTOCOL))
            )
            body["objects_fd"] = len(fds)
            fds.append(own_fds[-1])
        if self._layouts.get(key) != staged.layout:
            body["layout"] = _layout(staged, key)
        columns = (local.columns, local.replicated)
        known = self._columns
        # pickling 20,000 rows takes 7 ms of the training's time, comparing them 1
        if known is None or not all(map(_same, columns, known)):
            body["columns"] = pickle.dumps(columns, pickle.HIGHEST_PROTOCOL)
            self._columns = columns
        body["source_arena"], body["source_layout"] = key, staged.layout
        self._layouts[key] = staged.layout

    def _add_arena(self, arena: HostArena, body: dict[str, Any], fds: list[int]) -> int:
        """The number by which the child knows the arena's present mapping; told now if it does not yet."""
        for key, (known, generation) in self._arenas.items():
            if known() is arena and generation == arena.generation:
                return key
        if arena.fd is None:
            raise CheckpointError(f"the state was staged in {arena.kind} memory, which no other process sees")
        self._next_key += 1
        self._arenas[self._next_key] = (weakref.ref(arena), arena.generation)
        fds.append(arena.fd)
        body["arena"] = {"key": self._next_key, "size_bytes": arena.size_bytes}
        return self._next_key

    def _forget_arenas(self) -> list[int]:
        """Mappings that the child need not keep any more: it would keep their memory from being freed."""
        gone, self._gone = self._gone, []
        for key, (known, generation) in list(self._arenas.items()):
            arena = known()
            if arena is None or arena.closed or arena.generation != generation:
                gone.append(key)
                del self._arenas[key]
                self._layouts.pop(key, None)
        return gone


def _refusal(body: dict[str, Any], error: Exception) -> dict[str, Any]:
    """``body`` as the save's failure, without what is large or refers to descriptors."""
    short = {key: value for key, value in body.items() if isinstance(value, int | float | str | list)}
    return short | {"refused": plain_error(error)}


def _same(mine: object, others: object) -> bool:
    """Whether columns are equal, by value."""
    if mine is others:
        return True
    if type(mine) is not type(others):
        return False
    if isinstance(mine, np.ndarray) and isinstance(others, np.ndarray):
        return np.array_equal(mine, others)
    if isinstance(mine, (SaveColumns, SaveObjects)):
        return all(_same(getattr(mine, item.name), getattr(others, item.name)) for item in fields(mine))
    return bool(mine == others)


def _layout(staged: StagedState, arena: int) -> dict[str, Any]:
    sources = staged.local.sources
    shapes = [extent for source in sources for extent in source.shape]
    return {
        "key": staged.layout,
        "arena": arena,
        "offsets": np.asarray(staged.offsets, np.int64).tobytes(),
        "dtype_codes": bytes(dtype_code(source.dtype) for source in sources),
        "ndims": bytes(source.ndim for source in sources),
        "shapes": np.array(shapes, np.int64).tobytes(),
    }
