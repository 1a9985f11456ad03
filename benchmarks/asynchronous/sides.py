"""The sides of asynchronous saving behind one pair of calls: start a save, let go of what it kept."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import dcp
from benchmarks.peers import TORCH_CHECKPOINTING, torch_checkpointing_manager

__all__ = ["ASYNC_SIDES", "AsyncSide", "StartedSave"]

_TIMEOUT_SECONDS = 300


class StartedSave:
    """What a call of ``async_save`` gave back, whichever of torch's two kinds it is."""

    def __init__(self, response: Future[Any] | AsyncSaveResponse) -> None:
        self._staging: Future[Any] | None = getattr(response, "staging_completion", None)
        self._upload: Future[Any]
        if isinstance(response, AsyncSaveResponse):
            self._upload = response.upload_completion
        else:
            self._upload = response

    def wait_until_staged(self) -> None:
        """The state may change from here on."""
        if self._staging is not None:
            self._staging.result(_TIMEOUT_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether it has committed or failed."""
        return self._upload.done()

    def wait_until_committed(self) -> None:
        """The checkpoint is there, or its error is raised."""
        self._upload.result(_TIMEOUT_SECONDS)


class AsyncSide:
    """One way to save asynchronously; what it keeps from save to save, it keeps as long as this lives."""

    def __init__(
        self, save: Callable[..., Any], kind: AsyncCheckpointerType, stager: AsyncStager | None
    ) -> None:
        self._save = save
        self._kind = kind
        self._stager = stager

    def start(self, state_dict: dict[str, Any], folder: Path) -> StartedSave:
        """Begin to save durably to a fresh folder, as both sides do by default."""
        options: dict[str, Any] = {} if self._stager is None else {"async_stager": self._stager}
        return StartedSave(
            self._save(
                state_dict,
                checkpoint_id=str(folder),
                async_checkpointer_type=self._kind,
                no_dist=not dist.is_initialized(),
                **options,
            )
        )

    def close(self) -> None:
        """Let go of the stager's buffers."""
        if self._stager is not None:
            self._stager.close()


class _StartedWithLock(StartedSave):
    """torch-checkpointing gives a future of the commit alone; a lock keeps the state until it is copied."""

    def __init__(self, manager: Any, upload: Future[Any]) -> None:
        super().__init__(upload)
        self._manager = manager

    def wait_until_staged(self) -> None:
        """As its users wait before the optimizer's step."""
        with self._manager.lock():
            pass


class _TorchCheckpointing(AsyncSide):
    """As it comes: copies in shared memory and a process that writes, here with the fsyncs that it lacks."""

    def __init__(self) -> None:
        self._manager: Any = None

    def start(self, state_dict: dict[str, Any], folder: Path) -> StartedSave:
        """Begin to save; the first time its process is started, as the other sides' are."""
        if self._manager is None:
            self._manager = torch_checkpointing_manager(durable=True, asynchronous=True)
        return _StartedWithLock(self._manager, self._manager.save(str(folder), state_dict))

    def close(self) -> None:
        """End its process."""
        if self._manager is not None:
            self._manager.close()


def _reused_stager() -> AsyncStager:
    """The quickest of stock's that works without a GPU: nothing pinned nor shared, its copies are reused."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS

ASYNC_SIDES: dict[str, Callable[[], AsyncSide]] = {
    "ours_thread": lambda: AsyncSide(dcp.async_save, _THREAD, None),
    "ours_process": lambda: AsyncSide(dcp.async_save, _PROCESS, None),
    "stock": lambda: AsyncSide(stock.async_save, _THREAD, None),
    "stock_reused": lambda: AsyncSide(stock.async_save, _THREAD, _reused_stager()),
    "stock_process": lambda: AsyncSide(stock.async_save, _PROCESS, None),
    TORCH_CHECKPOINTING: _TorchCheckpointing,
}
"""Stock's process writer needs an initialized process group and a parent that may have children."""
