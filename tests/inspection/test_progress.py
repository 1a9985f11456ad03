"""Progress of inspections and the bytes they read. Internal: the command prints neither as numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dcp.inspection.values.difference import diff
from dcp.inspection.values.statistics import statistics
from dcp.inspection.values.tensor_reading import open_tensors
from dcp.inspection.verification import verify
from dcp.storage.formats.checksums import BLOCK_BYTES
from tests.command_line.cli_support import save_ours, state


def test_progress_counts_up_to_all_bytes(tmp_path: Path) -> None:
    """Progress never runs backwards and ends at the total, so that rate and time left mean something."""
    folder = save_ours(tmp_path / "x", state() | {"big": torch.zeros(5 * BLOCK_BYTES // 4)})
    calls: list[tuple[int, int]] = []
    report = verify(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (report.bytes, report.bytes)
    assert len({total for _, total in calls}) == 1


def test_only_what_differs_is_read(tmp_path: Path) -> None:
    """Of two tensors the one with equal checksums costs nothing; progress ends at the bytes of the other."""
    same, weight = torch.randn(300_000), torch.randn(400_000)
    a = save_ours(tmp_path / "a", {"same": same, "w": weight})
    b = save_ours(tmp_path / "b", {"same": same, "w": weight + 1})
    calls: list[tuple[int, int]] = []
    found = diff(a, b, progress=lambda done, total: calls.append((done, total)))
    assert found.bytes_read == 2 * weight.nbytes
    assert calls[-1] == (2 * weight.nbytes, 2 * weight.nbytes)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress counts the bytes of tensors, ties once, upwards."""
    weight = torch.randn(100)
    calls: list[tuple[int, int]] = []
    statistics(
        save_ours(tmp_path / "x", {"a": weight, "b": weight, "c": torch.ones(7)}),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(400, 428), (428, 428)]


def test_steps_over_many_bytes_read_only_what_is_taken(tmp_path: Path) -> None:
    """Rows that a step leaves out are not read where they are long; a slice does not read the rest."""
    tensor = torch.arange(400 * 30_000, dtype=torch.int32).reshape(400, 30_000)
    save_ours(tmp_path / "x", {"w": tensor})
    for index, needed in (
        ((slice(None, None, 100),), 4 * 120_000),
        ((slice(398, 90, -150), slice(7, 9)), 3 * 8),
        ((slice(3, 5),), 2 * 120_000),
        ((7, slice(20_000, None, 10_000)), 40_000),
    ):
        with open_tensors(tmp_path / "x", verify="none") as reader:
            assert np.array_equal(reader.read(0, index), tensor.numpy()[index])
            assert reader.bytes_read <= needed
