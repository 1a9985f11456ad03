"""Saves to paths that a trainer chooses, and deletions that wait until newer saves are committed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, get_args

import torch.distributed as dist

from dcp.background.future import SaveFuture
from dcp.errors import CheckpointError, OptionError
from dcp.manager.catalog import CatalogRegistration, Registrar, registration_of
from dcp.manager.cleanup.removal import remove_checkpoint
from dcp.ranks.collectives import Ranks
from dcp.state_dict_saver import AsyncCheckpointerType, async_save, save
from dcp.storage.stores.opening import OpenWith

__all__ = ["Mode", "PathSaves"]

Mode = Literal["thread", "process", "sync"]

_AFTER_ERROR_SECONDS = 60.0
"""The time for a save under way when training has ended with an exception: other ranks may be dead."""


class PathSaves:
    """The saves of one training. With ``no_dist`` from one process; else by all ranks together, which call
    everything but `remove` alike. ``catalog`` as for `CheckpointManager`: the run is the folder that a path
    is in. Raises OptionError for an unknown ``mode``, and ModuleNotFoundError where ``catalog`` needs httpx;
    of several ranks `agree` does.
    """

    def __init__(
        self,
        mode: Mode = "thread",
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | CatalogRegistration | None = None,
        *,
        no_dist: bool,
    ) -> None:
        if mode not in get_args(Mode):
            raise OptionError(f"mode must be 'thread', 'process' or 'sync', not {mode!r}")
        self.storage_options = storage_options
        self._mode = mode
        self._no_dist = no_dist
        self._asked = catalog
        self._catalog: CatalogRegistration | None = None
        self._missing: ModuleNotFoundError | None = None
        try:
            self._catalog = registration_of(catalog)
        except ModuleNotFoundError as error:
            if no_dist:
                raise
            self._missing = error  # ranks cannot talk yet
        self._timeout_seconds: float | None = None
        # Held while something is deleted: a save to its path waits for that.
        self._changed = threading.Condition()
        self._pending: list[SaveFuture] = []
        self._to_remove: list[str] = []
        self._failures: list[BaseException] = []
        self._registrars: dict[str, Registrar] = {}
        self._is_first = no_dist

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options, without the saves, for Trainers that start their ranks so."""
        options = self._mode, self.storage_options, self._asked
        return partial(PathSaves, no_dist=self._no_dist), options

    def agree(self) -> None:
        """Raise ModuleNotFoundError on the rank that lacks a package for ``catalog``, and on all others that
        it does; on all ranks, as soon as they can talk."""

        def own() -> bytes:
            if self._missing is not None:
                raise self._missing
            return b""

        Ranks(use_dist=True, operation="save").all_gather("catalog", own)

    def begin(self, state: dict[str, Any], path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Save ``state``; returns when it may change. Raises what an earlier save raised."""
        self._timeout_seconds = None
        if not self._no_dist:
            self.wait()  # whether it failed is known to all ranks only then
        self._raise_failure()
        self._is_first = self._no_dist or dist.get_rank() == 0
        name = os.fspath(path)
        if self._no_dist and os.path.isfile(name):  # noqa: PTH113 - may be a URL
            raise OptionError(f"{name} is a file, and a checkpoint of dcp is a folder: save to another place")
        with self._changed:
            self._to_remove = [each for each in self._to_remove if each != name]
            if self._is_first and os.path.islink(name):  # noqa: PTH114 - may be a URL
                os.unlink(name)  # noqa: PTH108 - what it names is a checkpoint of its own
        options: dict[str, Any] = {
            "checkpoint_id": name,
            "no_dist": self._no_dist,
            "user_metadata": {} if step is None else {"step": step},
            "storage_options": self.storage_options,
        }
        if self._mode == "sync":
            save(state, **options)
            if self._is_first:
                self._note(name, step)
            return
        kind = AsyncCheckpointerType.PROCESS if self._mode == "process" else AsyncCheckpointerType.THREAD
        future = async_save(state, async_checkpointer_type=kind, **options)
        with self._changed:
            self._pending.append(future)
        future.add_done_callback(partial(self._ended, name, step, future))  # at once, here, if it has ended

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, once the saves that are under way have ended. It stays where one has failed,
        also if that is not raised yet."""
        with self._changed:
            if self._failures:
                return
            self._to_remove.append(os.fspath(path))
            self._remove_if_committed()

    def wait(self) -> None:
        """Return when all saves and deletions have ended; raises what one raised."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending, self._timeout_seconds):
                for future in self._pending:
                    future.abort()
        self._raise_failure()

    def close(self) -> None:
        """`wait`, and some seconds for notes to the catalog."""
        try:
            self.wait()
        finally:
            with self._changed:
                registrars, self._registrars = self._registrars, {}
            for registrar in registrars.values():
                registrar.close()

    def hurry(self) -> None:
        """Do not wait for long until the next save: training has ended with an exception."""
        self._timeout_seconds = _AFTER_ERROR_SECONDS

    def _ended(self, path: str, step: int | None, future: SaveFuture, _: Future[Any]) -> None:
        """Note the end of a save, in the thread that carried it out."""
        error = future.exception()
        with self._changed:
            self._pending = [each for each in self._pending if each is not future]
            self._changed.notify_all()
            if error is not None:
                self._failures.append(error)
                self._to_remove.clear()  # what was to be replaced is still the newest
            elif self._is_first:
                self._note(path, step)
            self._remove_if_committed()

    def _note(self, path: str, step: int | None, *, deleted: bool = False) -> None:
        """Note for the catalog that ``path`` was saved or deleted."""
        if self._catalog is not None:
            folder, name = os.path.split(path)
            url = OpenWith(self.storage_options)(folder or ".").url
            if url not in self._registrars:
                self._registrars[url] = Registrar(self._catalog, url)
            self._registrars[url].tell(name, step, deleted=deleted)

    def _remove_if_committed(self) -> None:
        if self._pending:
            return
        while self._to_remove:
            path = self._to_remove.pop()
            try:
                if os.path.islink(path) or os.path.isfile(path):  # noqa: PTH113, PTH114 - may be a URL
                    os.unlink(path)  # noqa: PTH108
                else:
                    remove_checkpoint(OpenWith(self.storage_options)(path), time.time())
                self._note(path, None, deleted=True)
            except (CheckpointError, OSError) as error:
                self._failures.append(error)

    def _raise_failure(self) -> None:
        with self._changed:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]
