"""Other runs that save below the root of a manager at the same time."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from dcp.steps.folders import StepFolders
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointError
from dcp.storage.stores.opening import SmallFiles

__all__ = ["OtherRuns"]

logger = logging.getLogger(__name__)

_SKEW_SECONDS = 300.0
"""The difference that clocks of hosts may have."""


class OtherRuns:
    """Notices steps that another live run commits below ``folders``, and logs the first one.

    Two jobs that were given one folder by mistake overwrite and delete each other's steps.
    """

    def __init__(self, folders: StepFolders) -> None:
        self._folders = folders
        self._began = time.monotonic()
        self._began_seconds = time.time()
        self._begun: dict[int, float] = {}
        self._own: dict[int, str] = {}
        self._seen: dict[int, SmallFiles] = {}
        self._dropped: set[int] = set()
        self._is_warned = False

    def saving(self, step: int) -> None:
        """Note that this run saves ``step``."""
        self._own.pop(step, None)
        self._begun[step] = time.monotonic()

    def committed(self, step: int, save_id: str) -> None:
        """Note that this run has committed ``step``."""
        self._own[step] = save_id

    def dropping(self, step: int) -> None:
        """Note that this run drops a part of ``step``, which an earlier one may have saved."""
        self._dropped.add(step)

    def look(self, step: int, unsettled: Collection[int]) -> None:
        """Look for steps of other runs after this run has committed ``step``; one listing, and no more as
        long as there are none. Those that are ``unsettled`` are being saved here."""
        if self._is_warned:
            return
        try:
            folders = self._folders.folders()
        except CheckpointError as error:  # the next commit looks again; this one's retention continues
            logger.debug("%s: not looked at for other runs: %s", self._folders.root.url, error)
            return
        found = {
            each: {name: info for name, info in files.items() if is_commit_object(name)}
            for each, files in folders.items()
        }
        moments = {
            each: max((info.modified_seconds for info in files.values()), default=0.0)
            for each, files in found.items()
        }
        # By the clock of the storage: what is older was there before this run, or at its very beginning.
        since = moments.get(step, 0.0) - (self._begun.get(step, self._began) - self._began)
        for each, files in found.items():
            is_new = bool(files) and each not in unsettled and self._seen.get(each) != files
            if is_new:
                self._seen[each] = files
            if is_new and each != step and moments[each] > since and self._is_of_another(each):
                self._is_warned = True
                logger.warning(
                    "%s was committed by another run, while this one saves to the same folder: they "
                    "overwrite and delete each other's steps. Give each run a folder of its own",
                    self._folders.checkpoint_id(each),
                )
                return

    def _is_of_another(self, step: int) -> bool:
        if step in self._dropped or (step in self._begun and not self._own.get(step)):
            return False  # changed by this run, or of this run, which does not know by which id
        try:
            facts = self._folders.facts(step)
        except CheckpointError:
            return False
        written = facts.committed_seconds
        is_rewritten = written is not None and written < self._began_seconds - _SKEW_SECONDS
        return facts.save_id != self._own.get(step) and not is_rewritten
