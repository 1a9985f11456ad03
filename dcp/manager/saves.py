"""How a manager's saves are carried out: behind the training loop, or in it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from dcp.background.future import SaveFuture, SaveOutcome
from dcp.background.order import is_passing
from dcp.background.session import AsyncSession
from dcp.progress import ProgressCallback
from dcp.state_dict_saver import AsyncCheckpointerType, save
from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager

__all__ = ["Mode", "SaveOptions", "Saves", "check_group", "saves_of"]

logger = logging.getLogger(__name__)

Mode = Literal["thread", "process", "sync"]


@dataclass(frozen=True)
class SaveOptions:
    """What is the same for all saves of a manager."""

    process_group: ProcessGroup | None = None
    no_dist: bool = False
    planner: SavePlanner | None = None
    stager: AsyncStager | None = None
    retries: int = 2
    retry_pause_seconds: float = 1.0
    progress: bool | ProgressCallback | None = None
    timeout_seconds: float = 1800.0


class Saves(ABC):
    """Begins one save after the other. ``ends_at_once``: a save has ended when `begin` returns."""

    ends_at_once = False

    def __init__(self, options: SaveOptions) -> None:
        self._options = options

    @abstractmethod
    def begin(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriter,
        user_metadata: Mapping[str, Any],
        *,
        overlap: bool,
    ) -> SaveFuture:
        """Save ``state_dict`` by ``writer``; whatever fails is the future's error, on all ranks alike."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Hold off copies of the state."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """Let the saves under way end; call off those that have not after ``timeout_seconds``."""


class _BackgroundSaves(Saves):
    """In a thread or a process of this manager's own."""

    def __init__(self, options: SaveOptions, kind: AsyncCheckpointerType) -> None:
        super().__init__(options)
        self._session = AsyncSession(
            options.process_group,
            no_dist=options.no_dist,
            kind=kind,
            stager=options.stager,
            timeout_seconds=options.timeout_seconds,
            start=kind is AsyncCheckpointerType.PROCESS,
        )

    def begin(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriter,
        user_metadata: Mapping[str, Any],
        *,
        overlap: bool,
    ) -> SaveFuture:
        options = self._options
        return self._session.save(
            state_dict,
            storage_writer=writer,
            planner=options.planner,
            user_metadata=user_metadata,
            progress=options.progress,
            retries=options.retries,
            retry_pause_seconds=options.retry_pause_seconds,
            overlap=overlap,
        )

    def lock(self) -> AbstractContextManager[None]:
        return self._session.lock()

    def close(self, timeout_seconds: float) -> None:
        self._session.close(timeout_seconds)


class _SyncSaves(Saves):
    """In the training loop itself."""

    ends_at_once = True

    def begin(
        self,
        state_dict: dict[str, Any],
        writer: FileSystemWriter,
        user_metadata: Mapping[str, Any],
        *,
        overlap: bool,
    ) -> SaveFuture:
        future = SaveFuture(writer.checkpoint_id)
        attempt = 0
        while not future.done():
            attempt += 1
            begun = time.perf_counter()
            try:
                metadata = self._save(state_dict, writer, user_metadata)
            except Exception as error:  # noqa: BLE001 - the future's, which the manager looks at
                if (
                    isinstance(error, CheckpointError)
                    and is_passing(error)
                    and attempt <= self._options.retries
                ):
                    self._pause(attempt, error)
                    writer.reset()
                    continue
                future.staging_completion.set_result(None)
                future.set_exception(error)
            else:
                spent = time.perf_counter() - begun
                seconds = {"blocked": spent, "save": spent}
                future.outcome = SaveOutcome(writer.save_id, seconds, attempt)
                future.staging_completion.set_result(None)
                future.set_result(metadata)
        return future

    def _save(
        self, state_dict: dict[str, Any], writer: FileSystemWriter, user_metadata: Mapping[str, Any]
    ) -> Any:
        options = self._options
        check_group(no_dist=options.no_dist)
        return save(
            state_dict,
            storage_writer=writer,
            planner=options.planner,
            process_group=options.process_group,
            no_dist=options.no_dist,
            timeout_seconds=options.timeout_seconds,
            user_metadata=user_metadata,
            progress=options.progress,
        )

    def _pause(self, attempt: int, error: CheckpointError) -> None:
        pause = self._options.retry_pause_seconds * 2 ** (attempt - 1)
        logger.warning("attempt %d of a save failed, the next follows in %g s: %s", attempt, pause, error)
        time.sleep(pause)

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self, timeout_seconds: float) -> None:
        """Nothing is under way."""


def check_group(*, no_dist: bool) -> None:
    """Raise CheckpointError if the process group is gone, without which each rank would work alone."""
    if not no_dist and not dist.is_initialized():
        raise CheckpointError(
            "the process group that this manager was made for has been destroyed; restore, and save in mode "
            "'sync', before destroy_process_group()"
        )


def saves_of(mode: Mode, options: SaveOptions) -> Saves:
    """What carries out saves in ``mode``. Collective, except for "sync"."""
    if mode == "sync":
        return _SyncSaves(options)
    if mode not in ("thread", "process"):
        raise OptionError(f"mode must be 'thread', 'process' or 'sync', not {mode!r}")
    kind = AsyncCheckpointerType.PROCESS if mode == "process" else AsyncCheckpointerType.THREAD
    return _BackgroundSaves(options, kind)
