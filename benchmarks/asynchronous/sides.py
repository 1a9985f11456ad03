"""Contenders of asynchronous saving behind two calls: start a save, release what the contender keeps."""

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
    """The result of a call of ``async_save``, of either of torch's two types."""

    def __init__(self, response: Future[Any] | AsyncSaveResponse) -> None:
        self._staging: Future[Any] | None = getattr(response, "staging_completion", None)
        self._upload: Future[Any]
        if isinstance(response, AsyncSaveResponse):
            self._upload = response.upload_completion
        else:
            self._upload = response

    def wait_until_staged(self) -> None:
        """Wait until the state may change."""
        if self._staging is not None:
            self._staging.result(_TIMEOUT_SECONDS)

    @property
    def ended(self) -> bool:
        """Return True if the save has committed or failed."""
        return self._upload.done()

    def wait_until_committed(self) -> None:
        """Wait for the commit, or raise the error of the save."""
        self._upload.result(_TIMEOUT_SECONDS)


class AsyncSide:
    """One way to save asynchronously. Buffers and writers live as long as this object."""

    def __init__(
        self, save: Callable[..., Any], kind: AsyncCheckpointerType, stager: AsyncStager | None
    ) -> None:
        self._save = save
        self._kind = kind
        self._stager = stager

    def start(self, state_dict: dict[str, Any], folder: Path) -> StartedSave:
        """Start a durable save to a new folder."""
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
        """Release the buffers of the stager."""
        if self._stager is not None:
            self._stager.close()


class _StartedWithLock(StartedSave):
    """A save of torch-checkpointing: a future of the commit, and a lock until the state is copied."""

    def __init__(self, manager: Any, upload: Future[Any]) -> None:
        super().__init__(upload)
        self._manager = manager

    def wait_until_staged(self) -> None:
        """Wait as a training loop does before the optimizer step."""
        with self._manager.lock():
            pass


class _TorchCheckpointing(AsyncSide):
    """torch-checkpointing with its defaults: shared memory, a writer process; fsync is added here."""

    def __init__(self) -> None:
        self._manager: Any = None

    def start(self, state_dict: dict[str, Any], folder: Path) -> StartedSave:
        """Start a save; the first call also starts the writer process."""
        if self._manager is None:
            self._manager = torch_checkpointing_manager(durable=True, asynchronous=True)
        return _StartedWithLock(self._manager, self._manager.save(str(folder), state_dict))

    def close(self) -> None:
        """End the writer process."""
        if self._manager is not None:
            self._manager.close()


def _reused_stager() -> AsyncStager:
    """Return the fastest stager of stock torch that works without a GPU: it reuses its copies."""
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
