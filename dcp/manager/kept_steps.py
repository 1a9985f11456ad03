"""Which checkpoints a run has, for whoever trains: listed, pinned, deleted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from dcp.calls.plain_errors import plain_errors
from dcp.manager.cleanup.post_commit import PostCommitWorker
from dcp.steps.folders import StepFolders, whole_step
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["KeptSteps"]


class KeptSteps(ABC):
    """The steps of a run below ``_folders``; ``_post_commit`` (of rank 0) deletes."""

    rank: int
    _folders: StepFolders
    _post_commit: PostCommitWorker | None

    @abstractmethod
    def _check_open(self) -> None:
        """Raise CheckpointError where nothing may be changed any more."""

    def checkpoint_id(self, step: int) -> str:
        """What `dcp.load` takes to load the checkpoint of ``step``, be there one or not.

        Args:
            step: Of the training.

        Returns:
            A path or URL.

        Raises:
            OptionError: ``step`` is no whole number from 0.
        """
        return self._folders.checkpoint_id(step)

    @plain_errors
    def all_steps(self) -> list[int]:
        """The committed steps, ascending, as this process sees them on the storage; not those that are to be
        deleted.

        Raises:
            StorageError: The storage cannot be listed.
        """
        going = self._going()
        return [step for step in self._folders.all_steps() if step not in going]

    @plain_errors
    def latest(self) -> int | None:
        """The newest of `all_steps`; `restore` may find it damaged and take an older one.

        Returns:
            The step; None if nothing is committed.

        Raises:
            StorageError: The storage cannot be listed.
        """
        return next(self._newest_first(), None)

    def _newest_first(self) -> Iterator[int]:
        going = self._going()
        return (step for step in self._folders.newest_first() if step not in going)

    def _going(self) -> set[int]:
        return set() if self._post_commit is None else set(self._post_commit.deleting())

    @plain_errors
    def delete(self, step: int) -> None:
        """Delete the checkpoint of ``step`` in the background; gone from `all_steps` at once, or an error.

        Rank 0 acts, and other ranks need not call it.

        Args:
            step: Of `all_steps`.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointError: It is pinned, or being saved or verified, or the manager is closed.
            OptionError: ``step`` is no whole number from 0.
        """
        self._check_open()
        if self._post_commit is None:
            return
        step = whole_step(step)
        self._require(step)
        if self._folders.notes(step).pinned:
            raise CheckpointError(f"step {step} is pinned: unpin it before it is deleted", step=step)
        self._post_commit.delete(step)

    @plain_errors
    def pin(self, step: int) -> None:
        """Keep ``step``, whatever `Retention` says. Rank 0 acts.

        Args:
            step: Of `all_steps`.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointError: The manager is closed.
        """
        self._set_pin(step, True)

    @plain_errors
    def unpin(self, step: int) -> None:
        """Leave ``step`` to `Retention` again, which looks at it after the next save. Rank 0 acts.

        Args:
            step: Of `all_steps`.

        Raises:
            CheckpointNotFoundError: There is none.
            CheckpointError: The manager is closed.
        """
        self._set_pin(step, False)

    def _set_pin(self, step: int, pinned: bool) -> None:
        self._check_open()
        if self.rank != 0:
            return
        self._require(step)
        self._folders.update_notes(step, lambda notes: replace(notes, pinned=pinned))

    def _require(self, step: int) -> None:
        if step in self._going() or not self._folders.has(step):
            raise CheckpointNotFoundError(f"{self.checkpoint_id(step)} holds no checkpoint", step=step)

    @plain_errors
    def pinned(self) -> list[int]:
        """The pinned ones of `all_steps`.

        Raises:
            StorageError: The storage cannot be listed.
        """
        going = self._going()
        return [step for step in self._folders.pinned() if step not in going]
