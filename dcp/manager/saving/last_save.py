"""The save that ends a run: by a deadline, where a notice came that has one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp.background.future import SaveFuture
from dcp.manager.saving.parts import weights_of
from dcp.manager.saving.step_saver import HANG_SECONDS, StepSaver
from dcp.steps.states import PARTIAL
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["LastSave"]

_CAUTION = 2.0
"""A save may take so many times what the slowest of the last ones did."""


@dataclass(frozen=True)
class LastSave:
    """Saves ``state_dict`` as ``step``, by writers and with metadata that ``prepare`` gives; all ranks do so
    alike.

    Where the time may be too short for all of it the entries ``weights`` are saved first, alone, and then all
    over them. What a deadline finds under way is called off by `Notices`. ``is_whole``: whether, by this
    rank's knowledge, the whole state of the step is committed already, which weights must not replace.
    """

    saver: StepSaver
    step: int
    state_dict: dict[str, Any]
    prepare: Callable[[], tuple[FileSystemWriter, dict[str, Any]]]
    weights: tuple[str, ...]
    is_whole: Callable[[], bool]

    def run(self) -> SaveFuture | None:
        """Save; it has ended when this returns. None if the deadline has passed already."""
        saver = self.saver
        left, expected = saver.coordinator.seconds_left(saver.ledger.expected_seconds)
        if left <= 0:
            saver.coordinator.saved(self.step, "stop")
            saver.events.emit("save_cancelled", self.step, error="the deadline has passed", reason="stop")
            return None
        end, first = time.monotonic() + left, None
        if self._comes_first(left, expected):
            first = self._save(end, self.weights)
            if not first.done() or first.cancelled():  # the same on all ranks
                return first
        whole = self._save(end)
        saver.ledger.raise_failure(damage=False)
        return first if first is not None and first.exception() is None and whole.cancelled() else whole

    def _comes_first(self, left_seconds: float, expected_seconds: float) -> bool:
        if not self.weights or left_seconds >= _CAUTION * expected_seconds or math.isinf(left_seconds):
            return False
        return not self.saver.coordinator.any_rank(self.is_whole())

    def _save(self, end: float, weights: tuple[str, ...] = ()) -> SaveFuture:
        """All of the state, or the ``weights`` alone."""
        saver, (writer, described) = self.saver, self.prepare()
        state_dict = self.state_dict
        if weights:
            state_dict, described = weights_of(state_dict, weights), {**described, PARTIAL: list(weights)}
        future = saver.begin(self.step, "stop", state_dict, writer, described, overlap=False)
        if math.isinf(end):
            saver.ledger.settle(saver.timeout_seconds)
        elif not saver.ledger.wait(max(0.0, end - time.monotonic()) + HANG_SECONDS):
            error = "the storage does not answer, and the deadline has come"
            saver.events.emit("save_cancelled", self.step, error=error, reason="stop")
        return future
