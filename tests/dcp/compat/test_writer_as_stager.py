"""A FileSystemWriter is an AsyncStager, as torch's: subclasses stage by overriding ``stage``."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

import dcp
from dcp import FsspecWriter
from dcp.state_dict_saver import AsyncCheckpointerType


class CountingWriter(dcp.FileSystemWriter):
    """Stages by torch's copy, counts, and keeps the copy as torch's cache does, which pins memory for it."""

    staged = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy."""
        type(self).staged += 1
        self.state_dict_cache = super().stage(state_dict)
        return self.state_dict_cache


def loaded(folder: Path, like: torch.Tensor) -> torch.Tensor:
    """What is saved under "w"."""
    state = {"w": torch.zeros_like(like)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["w"]


def test_writers_are_stagers_as_torchs_are(tmp_path: Path) -> None:
    """The class and the protocol are torch's, and a copy is one that later changes do not reach."""
    for made in (dcp.FileSystemWriter(tmp_path), FsspecWriter(str(tmp_path))):
        assert isinstance(made, AsyncStager)
        assert isinstance(made, BlockingAsyncStager)
        assert made.should_synchronize_after_execute is False
        w = torch.ones(3)
        staged = made.stage({"w": w})
        w.zero_()
        assert staged["w"].tolist() == [1, 1, 1]
        made.close()
    assert dcp.FileSystemWriter(tmp_path, cache_staged_state_dict=True).cache_staged_state_dict


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_a_subclass_that_stages_is_the_stager_of_its_saves(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    """Its ``stage`` is called once a save, before the call returns, for threads and processes."""
    w = torch.arange(5.0)
    CountingWriter.staged = 0
    for number in range(2):
        writer = CountingWriter(tmp_path / str(number))
        future = dcp.async_save({"w": w}, storage_writer=writer, async_checkpointer_type=kind, no_dist=True)
        w.add_(1)
        future.result(240)
        assert loaded(tmp_path / str(number), w).tolist() == [number + i for i in range(5)]
    assert CountingWriter.staged == 2


def test_a_stager_that_is_given_goes_before_the_writers(tmp_path: Path) -> None:
    """``async_stager`` is the caller's word."""
    CountingWriter.staged = 0
    w = torch.arange(5.0)
    stager = stock.staging.BlockingAsyncStager()
    dcp.async_save(
        {"w": w}, storage_writer=CountingWriter(tmp_path), async_stager=stager, no_dist=True
    ).result(240)
    assert CountingWriter.staged == 0
    assert loaded(tmp_path, w).equal(w)


def test_stocks_async_save_stages_by_our_writer(tmp_path: Path) -> None:
    """As by its own: the state may change when it returns."""
    w = torch.arange(5.0)
    future = stock.async_save({"w": w}, storage_writer=CountingWriter(tmp_path), no_dist=True)
    w.zero_()
    assert isinstance(future, Future)
    future.result(240)
    assert loaded(tmp_path, w).tolist() == [0, 1, 2, 3, 4]
