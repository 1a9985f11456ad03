"""Threads that copy, and limits of memory. Internal: neither fails on request from outside."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from dcp.staging import DefaultStager
from dcp.staging.copies import HostCopier
from dcp.staging.memory.available import _of_cgroup, available_bytes
from tests.staging.sources import collect


def test_available_memory_respects_the_limit_of_a_control_group(tmp_path: Path) -> None:
    """A container's limit counts, less what it uses, but for cached files; no limit says nothing."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 300000\nactive_file 50000\n")
    assert _of_cgroup(tmp_path) == 450000
    (tmp_path / "memory.max").write_text("max\n")
    assert _of_cgroup(tmp_path) is None
    assert _of_cgroup(tmp_path / "none") is None
    there = available_bytes()
    assert there is not None
    assert 0 < there < 1 << 50


MIB = 1 << 20


def test_an_error_of_one_thread_is_raised_after_all_have_ended() -> None:
    """No thread still writes to the memory when the caller learns that the staging failed."""
    state = {"large": torch.ones(40 * MIB, dtype=torch.uint8), "small": torch.ones(3)}
    local = collect(state)
    stager = DefaultStager(threads=2)
    stager._copier.host.close()
    staged_error = stager.stage_local(local).done.exception(240)
    assert isinstance(staged_error, RuntimeError)
    with stager.lock(1.0):
        state["small"].add_(1)
    stager.close()


def test_a_share_that_fails_ends_the_copy() -> None:
    """What is left is not begun; its error is the copy's, from whichever thread."""
    copier, taken = HostCopier(2), list[int]()

    def share(number: int) -> None:
        taken.append(number)
        if number == 3:
            raise IndexError("out of range")

    with pytest.raises(IndexError, match="out of range"):
        copier._run([partial(share, number) for number in range(10_000)])
    assert len(taken) < 10_000
    copier._run([partial(share, 4)])
    copier.close()
