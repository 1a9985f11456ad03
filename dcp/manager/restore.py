"""Restore the newest readable checkpoint, the same on all ranks.

Damaged or deleted checkpoints are skipped. Errors of the storage are retried and then raised, because an
older checkpoint would set training back. A state dict that does not fit is raised at once.

`dcp.load` raises the same error on all ranks, and only the coordinator lists steps, so all ranks select the
same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dcp.loading.feature import LoadReport
from dcp.planners.load.selection import LoadKeywords, check_names
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.ranks.agreement import begin, raise_on_all_ranks
from dcp.ranks.collectives import Ranks, retried
from dcp.ranks.failures import causes_of, is_damage
from dcp.steps import StepFolders, partial_of, whole_step
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeyError,
    StorageError,
)
from dcp.storage.formats.opening import has_checkpoint, open_index
from dcp.storage.formats.views import dropped_from

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REASON_CHARACTERS = 500
_RETRIES = 3


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Attributes:
        step: Restored step.
        report: `LoadReport` of this rank.
        skipped: Newer steps that were skipped, newest first, with the reason.
        skipped_partial: Skipped steps that are intact but partial.
        metrics: Metrics given to the save.
        user_metadata: All user metadata of the save.
        world_size: Number of ranks that saved, if recorded.
    """

    step: int
    report: LoadReport
    skipped: tuple[tuple[int, str], ...]
    metrics: Mapping[str, float]
    user_metadata: dict[str, Any]
    world_size: int | None
    checkpoint_id: str
    skipped_partial: tuple[int, ...] = ()


@dataclass(eq=False)
class Restoring:
    """Restore by all ``ranks``.

    ``load`` loads a checkpoint id and raises the errors of `dcp.load`. ``list_steps`` yields the committed
    steps of ``folders``, newest first, on the coordinator. ``on_damage`` is called on every rank for each
    damaged step; its exceptions are logged. Errors of the storage are retried after ``pause_seconds``,
    doubled each time.
    """

    ranks: Ranks
    folders: StepFolders
    list_steps: Callable[[], Iterable[int]]
    load: Callable[..., LoadReport]
    on_damage: Callable[[int, CheckpointError], None] | None
    pause_seconds: float

    def restored(self, step: int | None, options: LoadKeywords) -> Restored | None:
        """Load the newest readable step, or ``step``, with ``options`` of `dcp.load`.

        Returns None without a committed step. Raises CorruptCheckpointError if all steps are damaged, and
        other errors of `dcp.load` at once, or after retries for errors of the storage.

        Entries filled by a failed attempt are filled again or reset. `Stateful` objects receive their state
        once.
        """
        self.skipped: dict[int, str] = {}
        self.partial: list[int] = []
        self.filled: set[str] = set()
        """Entries filled by an attempt."""
        with raise_on_all_ranks(self.ranks):
            step = None if step is None else whole_step(step)
            if (weights := options.get("map")) is not None:
                options["map"] = WeightMap.of(weights)
            check_names("restore", options)
            self.options = options
        manner = [] if step is None else [f"of step {step}"]
        places = begin(self.ranks, lambda: self.folders.root.url, manner=manner)
        if len(set(places)) > 1 and self.ranks.is_coordinator:
            named = ", ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            logger.warning("ranks restore from different roots, which must be the same folder: %s", named)
        return self._newest() if step is None else self._only(step)

    def _newest(self) -> Restored | None:
        # List again each time: a writer process of the previous job may still commit and delete.
        while found := self._first(lambda step: step not in self.skipped):
            step = int(found)
            # partial loading would hide missing entries
            reason = self._agreed_lack(step) if self.options.get("allow_partial_load") else ""
            if not reason:
                try:
                    return self._load(step)
                except CheckpointError as error:
                    if is_unusable(error):
                        self.skipped[step] = self._skip(step, error)
                        continue
                    reason = self._agreed_lack(step) if _is_missing(error) else ""
                    if not reason:
                        raise
            self.skipped[step] = reason
            self.partial.append(step)
        if not self.skipped:
            with raise_on_all_ranks(self.ranks):
                if self.ranks.is_coordinator:
                    self.folders.check_run()
            return None
        steps = sorted(self.skipped, reverse=True)
        listed = "\n".join(f"  step {step}: {self.skipped[step]}" for step in steps)
        raise CorruptCheckpointError(
            f"none of the {len(steps)} committed steps can be restored:\n{listed}\nRestore their files from "
            "a backup; to start training afresh, use another root or delete these steps.",
            steps=steps,
            reasons=[self.skipped[step] for step in steps],
        )

    def _only(self, step: int) -> Restored:
        try:
            return self._load(step)
        except CheckpointError as error:
            if is_unusable(error):
                self._skip(step, error)
            elif _is_missing(error) and self._agreed_lack(step):
                newest = self._first(lambda one: one != step and not self._lack(one))
                if newest:
                    error.add_note(f"the newest step that has it is {newest}")
            raise

    def _first(self, is_wanted: Callable[[int], bool]) -> str:
        """Return the newest wanted step listed by the coordinator; "" if none."""

        def packed() -> bytes:
            return next((b"%d" % step for step in self.list_steps() if is_wanted(step)), b"")

        what = "the listing of the steps"
        return self._retried(what, lambda _: self.ranks.broadcast("steps", packed)).decode()

    def _load(self, step: int) -> Restored:
        place = self.folders.checkpoint_id(step)
        report = self._retried(
            f"the restore of step {step}",
            lambda _: self.load(self.options, checkpoint_id=place, filled=self.filled),
        )
        stored = report.user_metadata.get("metrics")
        metrics = stored.items() if isinstance(stored, dict) else ()
        return Restored(
            step=step,
            report=report,
            skipped=tuple(sorted(self.skipped.items(), reverse=True)),
            metrics={name: float(value) for name, value in metrics if isinstance(value, int | float)},
            user_metadata=report.user_metadata,
            world_size=report.world_size,
            checkpoint_id=place,
            skipped_partial=tuple(self.partial),
        )

    def _retried(self, what: str, attempt: Callable[[int], T]) -> T:
        """Call ``attempt`` with its number until it succeeds, retrying errors of the storage."""
        try:
            pause_seconds = self.pause_seconds
            return retried(
                attempt, what, retries=_RETRIES, pause_seconds=pause_seconds, is_passing=_is_passing
            )
        except CheckpointError as error:
            if _is_passing(error):
                error.add_note(
                    f"{what} failed {_RETRIES + 1} times. No older checkpoint was loaded instead: the "
                    "storage may recover. To load an older checkpoint, pass its step."
                )
            raise

    def _skip(self, step: int, error: CheckpointError) -> str:
        """Report the damage of a step and return the reason in one line."""
        vanished = not self.ranks.broadcast("look", lambda: b"\x01" if self._is_committed(step) else b"")
        reason = " ".join(str(causes_of(error)[0]).split())[:_MAX_REASON_CHARACTERS]
        if not vanished and self.on_damage is not None:
            try:
                self.on_damage(step, error)
            except Exception:  # a failure on one rank must not separate it from the other ranks
                logger.exception("the damage of %s could not be recorded", self.folders.checkpoint_id(step))
        return "it was deleted" if vanished else reason

    def _agreed_lack(self, step: int) -> str:
        return self.ranks.broadcast("parts", lambda: self._lack(step).encode()).decode()

    def _lack(self, step: int) -> str:
        """Describe the missing entries of a partial checkpoint and how to load the rest; "" for other
        checkpoints.
        """
        try:
            index = open_index(self.folders.store(step))
        except CheckpointError:
            return ""
        rest = f"restore(state, only=...) or restore(state, {step}, only=...) loads"
        names, dropped = partial_of(index.user), dropped_from(index.provenance)
        if names:
            return f"it was saved before a deadline with {', '.join(names)} only; {rest} these entries"
        return f"its {'; '.join(map(str, dropped))}: {rest} the remaining entries" if dropped else ""

    def _is_committed(self, step: int) -> bool:
        try:
            return has_checkpoint(self.folders.store(step))
        except CheckpointError:
            return True


def is_unusable(error: CheckpointError) -> bool:
    """Return whether the checkpoint is damaged or deleted."""
    return all(is_damage(cause) or isinstance(cause, CheckpointNotFoundError) for cause in causes_of(error))


def _is_missing(error: CheckpointError) -> bool:
    """Return whether the checkpoint lacks requested entries."""
    return all(isinstance(cause, MissingKeyError) for cause in causes_of(error))


def _is_passing(error: CheckpointError) -> bool:
    """Return whether the storage failed on some ranks and no rank has a permanent error."""
    passing = StorageError, CheckpointConflictError
    causes = causes_of(error)
    return any(isinstance(cause, passing) for cause in causes) and all(
        isinstance(cause, (*passing, CheckpointNotFoundError)) or is_damage(cause) for cause in causes
    )
