"""Statistics of a checkpoint's tensors, in one pass over their tiles and in bounded memory. Torch-free.

How they are found, and what exactly they are, is in `dcp.inspection.values.summaries`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.entries import first_of_ties
from dcp.inspection.findings import ReportBytes
from dcp.inspection.values.elements import is_opaque
from dcp.inspection.values.summaries import MIN_BINS, Collector, ElementStatistics, Histogram, Summary
from dcp.inspection.values.tensor_reading import TensorReader, open_tensors
from dcp.planners.load.selection import Patterns
from dcp.storage.errors import OptionError

__all__ = [
    "CheckpointStatistics",
    "ElementStatistics",
    "Histogram",
    "TensorStatistics",
    "statistics",
    "statistics_of",
    "statistics_of_row",
]


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """One tensor. ``statistics`` is None for dtypes of bits without a meaning."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: ElementStatistics | None


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """Each tensor, and all of them together. ``bytes_read`` counts payloads that tensors share once."""

    url: str
    tensors: tuple[TensorStatistics, ...]
    total: ElementStatistics
    bytes_read: int


@plain_errors
def statistics(
    checkpoint_id: str | os.PathLike[str],
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    bins: int = 32,
    storage_options: Mapping[str, Any] | None = None,
    progress: ReportBytes | None = None,
) -> CheckpointStatistics:
    """Read the tensors of a checkpoint and describe their values.

    Each name counts, also of tied tensors, whose bytes are read once. Memory is bounded by some 64 MiB.

    Args:
        checkpoint_id: A path or URL: a checkpoint, a torch.save file, a safetensors file, or a Hugging Face
            folder.
        only: Shell globs on names, as for `dcp.load`: what they match, and everything below.
        exclude: The same for what is left out.
        bins: The number of bins of each histogram, at most.
        storage_options: Of the file system of a URL, as for `dcp.save`.
        progress: A function that gets the bytes done and those in all.

    Returns:
        Statistics by tensor, in the checkpoint's order, and of all of them.

    Raises:
        PlanError: Nothing is selected, or there are too few ``bins``.
        CheckpointNotFoundError: Nothing is committed there.
        CorruptCheckpointError: Bytes are not those that were committed.
        StorageError: The storage cannot be read.
    """
    with open_tensors(checkpoint_id, storage_options=storage_options, verify="full") as reader:
        return statistics_of(reader, only=only, exclude=exclude, bins=bins, progress=progress)


def statistics_of(
    reader: TensorReader,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    bins: int = 32,
    progress: ReportBytes | None = None,
) -> CheckpointStatistics:
    """`statistics` of an open checkpoint."""
    if bins < MIN_BINS:
        raise OptionError(f"bins must be at least {MIN_BINS}, not {bins}")
    index = reader.index
    rows = reader.rows(only, exclude)
    firsts = first_of_ties(index, rows)
    times = Counter(firsts)
    total = Summary()
    found: dict[int, ElementStatistics] = {}
    for row, summary in _summaries(
        reader, [row for row in times if not is_opaque(index.dtype(row))], progress
    ):
        found[row] = summary.result(bins)
        total.merge(summary, times[row])
    tensors = tuple(
        TensorStatistics(index.fqns[row], index.dtype(row).name, index.shape(row), found.get(first))
        for row, first in zip(rows, firsts, strict=True)
    )
    return CheckpointStatistics(reader.name, tensors, total.result(bins), reader.bytes_read)


def statistics_of_row(reader: TensorReader, row: int, *, bins: int = 32) -> ElementStatistics | None:
    """Return the statistics of one tensor of an open checkpoint, by its row in the index; None for bits
    without a meaning."""
    if is_opaque(reader.index.dtype(row)):
        return None
    return next(summary for _, summary in _summaries(reader, [row], None)).result(bins)


def _summaries(
    reader: TensorReader, rows: list[int], progress: ReportBytes | None
) -> Iterator[tuple[int, Summary]]:
    """Yield summaries of the tensors ``rows``, each once, in their order."""
    for row in rows:
        if not reader.tensor_bytes(row):
            yield row, Summary()
    for row, tiles in reader.tiles_of(rows, progress):
        collector = Collector(reader.index.dtype(row), math.prod(reader.index.shape(row)))
        for tile in tiles:
            collector.add(tile.array)
        yield row, collector.summary()
