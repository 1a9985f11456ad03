"""How a manager's saves are carried out: in the training loop, or behind it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from dcp.background.future import SaveFuture
from dcp.background.session import AsyncSession
from dcp.background.writers import RefusedWriter
from dcp.saving.options import SaveOptions
from dcp.state_dict_saver import AsyncCheckpointerType, save_with
from dcp.storage.errors import CheckpointError
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager

__all__ = ["Mode", "SaveExecutor", "SaveSettings", "check_group", "save_executor"]

Mode = Literal["thread", "process", "sync"]


@dataclass(frozen=True)
class SaveSettings:
    """What is the same for all saves of a manager."""

    process_group: ProcessGroup | None = None
    no_dist: bool = False
    planner: SavePlanner | None = None
    stager: AsyncStager | None = None
    options: SaveOptions = field(default_factory=SaveOptions)


class SaveExecutor:
    """Saves in the training loop itself. ``ends_at_once``: a save has ended when `begin` returns.
    ``resumed_from``: what the run goes on from, which the saves to come note."""

    ends_at_once = True

    def __init__(self, settings: SaveSettings) -> None:
        self._settings = settings
        self._current: SaveFuture | None = None
        self.resumed_from: Mapping[str, Any] | None = None

    def begin(
        self, state_dict: dict[str, Any], writer: FileSystemWriter, user: Mapping[str, Any], *, overlap: bool
    ) -> SaveFuture:
        """Save ``state_dict`` by ``writer``, with the metadata of the ``user``; whatever fails is the
        future's error, on all ranks alike."""
        future = self._current = SaveFuture(writer.checkpoint_id)
        settings, begun = self._settings, time.perf_counter()
        try:
            check_group(no_dist=settings.no_dist)
            metadata, outcome = save_with(
                state_dict,
                self._options_of(user),
                storage_writer=writer,
                planner=settings.planner,
                process_group=settings.process_group,
                no_dist=settings.no_dist,
                abort=future.abort_event,
            )
        except Exception as error:  # noqa: BLE001 - the future's, which the manager looks at
            future.staging_completion.set_result(None)
            future.set_exception(error)
        else:
            spent = time.perf_counter() - begun
            future.outcome = replace(outcome, seconds=outcome.seconds | {"blocked": spent})
            future.staging_completion.set_result(None)
            future.set_result(metadata)
        finally:
            self._current = None
        return future

    def _options_of(self, user: Mapping[str, Any]) -> SaveOptions:
        options, step = self._settings.options, user.get("step")
        return replace(options, step=step, resumed_from=self.resumed_from, user_metadata=dict(user))

    def refuse(self, error: Exception) -> bool:
        """Fail the save that the other ranks begin with ``error``; False if there are none."""
        if not self._settings.no_dist:
            self.begin({}, RefusedWriter(error), {}, overlap=False)
        return not self._settings.no_dist

    def under_way(self) -> list[SaveFuture]:
        """The saves that have not ended; from any thread."""
        current = self._current
        return [] if current is None else [current]

    def lock(self) -> AbstractContextManager[None]:
        """Hold off copies of the state."""
        return nullcontext()

    def close(self, timeout_seconds: float) -> None:
        """Let the saves under way end; call off those that have not after ``timeout_seconds``."""


class _BackgroundExecutor(SaveExecutor):
    """Saves behind the loop, in a thread or a process of this manager's own."""

    ends_at_once = False

    def __init__(self, settings: SaveSettings, kind: AsyncCheckpointerType) -> None:
        super().__init__(settings)
        self._session = AsyncSession(
            settings.process_group,
            no_dist=settings.no_dist,
            kind=kind,
            stager=settings.stager,
            timeout_seconds=settings.options.timeout_seconds,
            start=kind is AsyncCheckpointerType.PROCESS,
        )

    def begin(
        self, state_dict: dict[str, Any], writer: FileSystemWriter, user: Mapping[str, Any], *, overlap: bool
    ) -> SaveFuture:
        settings = self._settings
        return self._session.save(
            state_dict,
            storage_writer=writer,
            planner=settings.planner,
            options=self._options_of(user),
            overlap=overlap,
        )

    def refuse(self, error: Exception) -> bool:
        self._session.refuse(error)
        return self._session.world_size > 1

    def under_way(self) -> list[SaveFuture]:
        return self._session.under_way()

    def lock(self) -> AbstractContextManager[None]:
        return self._session.lock()

    def close(self, timeout_seconds: float) -> None:
        self._session.close(timeout_seconds)


def check_group(*, no_dist: bool) -> None:
    """Raise CheckpointError if the process group is gone, without which each rank would work alone."""
    if not no_dist and not dist.is_initialized():
        raise CheckpointError(
            "the process group that this manager was made for has been destroyed; restore, and save in mode "
            "'sync', before destroy_process_group()"
        )


def save_executor(mode: Mode, settings: SaveSettings) -> SaveExecutor:
    """What carries out saves in ``mode``. Collective, except for "sync"."""
    if mode == "sync":
        return SaveExecutor(settings)
    return _BackgroundExecutor(settings, AsyncCheckpointerType(mode))
