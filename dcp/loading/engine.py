"""One way from a checkpoint into a state dict: what both ways have in common, and the steps of each.

`dcp.engines` chooses the way, once a load.
"""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from dcp.loading.report import LoadReport
from dcp.loading.targets import GivenState
from dcp.planners.load.options import LoadAttempt, LoadOptions
from dcp.ranks.failures import causes_of, is_damage
from dcp.ranks.handshake import told_to_all
from dcp.storage.errors import CheckpointConflictError, CheckpointError, StorageError
from dcp.storage.near_names import listed

if TYPE_CHECKING:
    from dcp.planners.load.planner import DefaultLoadPlanner
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.reader import FileSystemReader

__all__ = ["LoadEngine"]

logger = logging.getLogger(__name__)

_MAX_LISTED = 10
_ATTEMPTS = 3


class LoadEngine(ABC):
    """One load: plan what goes where, read it, give objects their state.

    ``planner`` and ``storage`` are None where they are not ours. ``options`` are those of the call,
    over those of the planner.
    """

    stores_later = False
    """Whether values wait for the whole load to succeed."""

    def __init__(
        self,
        ranks: Ranks,
        options: LoadOptions,
        planner: DefaultLoadPlanner | None,
        storage: FileSystemReader | None,
    ) -> None:
        self.ranks = ranks
        self.options = options if planner is None else options.over(planner)
        self._given = options
        self._ours = planner
        self._storage = storage
        self._has_given_back = False

    @abstractmethod
    def plan(self, targets: GivenState, report: LoadReport) -> None:
        """Find the checkpoint, and what of it goes where in ``targets``; errors are of all ranks alike, as in
        each step."""

    @abstractmethod
    def read(self, report: LoadReport) -> None:
        """Fill what was planned."""

    def load(self, targets: GivenState, filled: set[str] | None = None) -> LoadReport:
        """Load into ``targets``.

        ``filled`` are entries that a load which failed may have filled, so that this one must; those that it
        fills are added if it fails.
        """
        filled = filled if filled is not None else set()
        with ExitStack() as stack:
            if self._storage is not None:
                with told_to_all(self.ranks):
                    stack.enter_context(self._storage.in_use())
            try:
                report = self._load_committed(targets, filled)
            except BaseException:
                targets.take_back()
                raise
            if targets.gives_back and not self._has_given_back:
                self._give_back_together(targets, filled)
            return report

    def _load_committed(self, targets: GivenState, filled: set[str]) -> LoadReport:
        """Again where the checkpoint was replaced after its index was read, so that files of it are gone.

        Raises CheckpointConflictError if that has no end: it is no damage, for which an older one is taken.
        """
        attempts = 1
        while True:
            try:
                return replace(self._attempt(targets, filled), attempts=attempts)
            except CheckpointError as error:
                self._look_again(error, attempts)
            attempts += 1

    def _look_again(self, error: CheckpointError, attempts: int) -> None:
        """Raise ``error``, or what it means, unless another attempt may end better."""
        causes, storage = causes_of(error), self._storage
        if storage is None or not all(is_damage(cause) or _is_stale(cause) for cause in causes):
            raise error

        def look() -> bytes:
            if not storage.was_replaced():
                return b""
            if attempts < _ATTEMPTS:
                return b"\x01"
            place = storage.place.url
            raise CheckpointConflictError(
                f"{place} was replaced while it was being read, in each of {attempts} attempts; load again "
                f"when no job saves there, and give each save its own id. The last attempt: {error}",
                path=place,
            ) from error

        is_replaced = bool(self.ranks.broadcast("look again", look))
        if not is_replaced and (attempts == _ATTEMPTS or not any(map(_is_stale, causes))):
            raise error

    def _attempt(self, targets: GivenState, filled: set[str]) -> LoadReport:
        report = LoadReport()
        attempt = LoadAttempt(
            options=self._given,
            unasked=targets.unasked,
            must_fill=frozenset(filled),
            stores_later=self.stores_later,
        )
        planner, ranks = self._ours, self.ranks
        if planner is not None:
            planner.begin_load(ranks.rank, ranks.world_size, attempt)
        try:
            self.plan(targets, report)
            self.read(report)
        except BaseException:
            self._note_filled(targets, filled)
            raise
        finally:
            if planner is not None:
                planner.end_load()
        if planner is not None:
            _warn_of_other_ranks(planner, report, ranks)
        if self._storage is not None:
            report.storage = self._storage.traffic
        return report

    def plan_fitting(self, targets: GivenState, plan: Callable[[], object]) -> None:
        """Call ``plan``, which asks ``targets`` for the state, until it succeeds or nothing else may fit."""
        while True:
            try:
                plan()
            except CheckpointError as error:
                if not targets.fits_after(error):
                    raise
            else:
                return

    def _give_back_together(self, targets: GivenState, filled: set[str]) -> None:
        try:
            self.ranks.all_gather("load_state_dict", lambda: self._give_back(targets))
        except BaseException:
            self._note_filled(targets, filled)
            raise

    def _give_back(self, targets: GivenState) -> bytes:
        planner = self._ours
        if planner is None:
            targets.give_back((), ())
        else:
            targets.give_back(planner.untouched_keys, planner.materialised_keys)
        self._has_given_back = True
        return b""

    def _note_filled(self, targets: GivenState, filled: set[str]) -> None:
        if self._ours is not None:
            filled |= self._ours.touched_keys - targets.made


def _is_stale(cause: BaseException) -> bool:
    """Whether a file has been deleted or replaced on another host since it was opened, as NFS says it."""
    return isinstance(cause, StorageError) and cause.errno == errno.ESTALE


def _warn_of_other_ranks(planner: DefaultLoadPlanner, report: LoadReport, ranks: Ranks) -> None:
    """Say which `PerRank` values do not go on where the ranks that saved them were."""
    kept, left = (listed(names, most=_MAX_LISTED) for names in (planner.kept_per_rank, planner.left_per_rank))
    if not kept and not left:
        return
    if report.world_size in (None, ranks.world_size):
        if kept:
            logger.warning("the checkpoint has no %s of rank %d: left as before the load", kept, ranks.rank)
    elif ranks.is_coordinator:
        what = (
            f"{kept} of every rank is left as before the load, such as a data loader at its beginning"
            if kept
            else f"each rank takes its own of {left}, and what the other ranks had is not loaded"
        )
        logger.warning("saved by %s ranks, loaded by %d: %s", report.world_size, ranks.world_size, what)
