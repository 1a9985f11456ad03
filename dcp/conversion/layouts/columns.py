"""The parts of the source that copies are made of, as columns: a checkpoint may have millions.

A task carries a window of these columns, and makes the objects that reading needs (`TaskCopy`, `SourcePart`)
of those that it is at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np

from dcp.conversion.layouts.layout import Copies
from dcp.conversion.layouts.pieces import SourcePart
from dcp.conversion.layouts.terms import Term, TermColumns
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Int64, itemsizes, starts
from dcp.storage.geometry.ragged import expand_ranges, gather_rows, row_products, row_sums

__all__ = ["SourceColumns", "TaskCopies", "TaskCopy"]


class TaskCopy(NamedTuple):
    """A copy of the layout: ``size_bytes`` from ``begin`` of the target file on. ``is_padded``: elements that
    no source has are zeros. With ``terms`` it is their sum, and has no ``sources`` of its own."""

    copy: int
    begin: int
    size_bytes: int
    source_code: int
    target_code: int
    is_padded: bool
    sources: tuple[SourcePart, ...]
    terms: tuple[Term, ...] = ()

    @property
    def elements(self) -> int:
        """How many it has."""
        return self.size_bytes // dtypes.BY_CODE[self.target_code].itemsize


@dataclass(frozen=True, eq=False)
class SourceColumns:
    """The `SourcePart`es of copies: those of copy n are rows ``start[n]`` to ``start[n + 1]``; of gathers,
    where copies are sums of these.

    What there is by axis is flat, sliced by ``axis_start``.
    """

    start: Int64
    chunks: Int64
    files: Int64
    payload_offsets: Int64
    payload_bytes: Int64
    begins: Int64
    targets: Int64
    axis_start: Int64
    lengths: Int64
    strides: Int64
    target_strides: Int64

    def take(self, copies: Int64) -> SourceColumns:
        """The sources of ``copies``, in that order."""
        counts = self.start[copies + 1] - self.start[copies]
        rows = expand_ranges(self.start[copies], counts)
        flat = {name: gather_rows(getattr(self, name), self.axis_start, rows) for name in _BY_AXIS}
        return SourceColumns(
            start=starts(counts),
            axis_start=starts(self.axis_start[rows + 1] - self.axis_start[rows]),
            **{name: getattr(self, name)[rows] for name in _BY_ROW},
            **flat,
        )

    def parts(self, first: int, last: int) -> Iterator[tuple[SourcePart, ...]]:
        """The parts of the copies ``first`` to ``last``, copy by copy."""
        bounds = self.start[first : last + 1].tolist()
        rows = slice(bounds[0], bounds[-1])
        places = self.axis_start[bounds[0] : bounds[-1] + 1].tolist()
        by_axis = [getattr(self, name)[places[0] : places[-1]].tolist() for name in _BY_AXIS]
        columns = [getattr(self, name)[rows].tolist() for name in _BY_ROW]
        found = []
        low = 0
        for row, facts in enumerate(zip(*columns, strict=True)):
            high = places[row + 1] - places[0]
            found.append(SourcePart(*facts, *(tuple(values[low:high]) for values in by_axis)))
            low = high
        for begin, end in pairwise(bounds):
            yield tuple(found[begin - bounds[0] : end - bounds[0]])

    def elements(self) -> Int64:
        """How many each copy has from its sources."""
        own = row_products(self.lengths, self.axis_start)
        return row_sums(own, self.start)

    def chunks_of(self, first: int, last: int) -> Int64:
        """The chunks of the copies ``first`` to ``last``."""
        return np.unique(self.chunks[self.start[first] : self.start[last]])

    @property
    def is_sequential(self) -> bool:
        """Whether rows of each copy follow one another in the stored payloads, so that a range of a copy is a
        few ranges of payloads."""
        counts = np.diff(self.axis_start)
        wide = self.lengths > 1
        rows = np.repeat(np.arange(len(counts)), counts)[wide]
        steps = self.strides[wide]
        return not ((rows[1:] == rows[:-1]) & (steps[1:] > steps[:-1])).any()


_BY_ROW = ("chunks", "files", "payload_offsets", "payload_bytes", "begins", "targets")
_BY_AXIS = ("lengths", "strides", "target_strides")


@dataclass(frozen=True, eq=False)
class TaskCopies:
    """Copies of one file in the order of their places: of a whole file, or of a range of it.

    ``padded`` is 1 for those of which some elements are zeros that no source has. With ``terms`` the copies
    are sums, and ``sources`` are those of the terms' gathers.
    """

    numbers: Int64
    begins: Int64
    size_bytes: Int64
    source_codes: Int64
    target_codes: Int64
    padded: Int64
    sources: SourceColumns
    terms: TermColumns | None = None

    @classmethod
    def of(
        cls,
        copies: Copies,
        rows: Int64,
        source_codes: Int64,
        sources: SourceColumns,
        terms: TermColumns | None = None,
    ) -> TaskCopies:
        """The copies in ``rows`` of a layout's copies."""
        summed, codes = None if terms is None else terms.take(rows), copies.dtype_codes[rows]
        own = sources.take(rows if terms is None else terms.gathers_of(rows))
        elements = copies.size_bytes[rows] // itemsizes(codes.astype(np.uint8))
        found = own.elements() if summed is None else summed.fewest(own.elements())
        return cls(
            rows,
            copies.offsets[rows],
            copies.size_bytes[rows],
            source_codes[rows],
            codes,
            (found < elements).astype(np.int64),
            own,
            summed,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def rows_between(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the one behind the last that reach into bytes ``begin`` to ``end`` of the file."""
        first = int(np.searchsorted(self._ends, begin, "right"))
        return first, max(first, int(np.searchsorted(self.begins, end, "left")))

    @cached_property
    def _ends(self) -> Int64:
        return self.begins + self.size_bytes

    def end_of(self, begin: int, count: int) -> int | None:
        """Where the window from byte ``begin`` on ends that ``count`` copies reach into; None if that is all
        there are."""
        last = self.rows_between(begin, begin)[0] + count
        return int(self.begins[last]) if last < len(self) else None

    def between(self, begin: int, end: int) -> Iterator[TaskCopy]:
        """The copies that reach into bytes ``begin`` to ``end`` of the file, in order."""
        first, last = self.rows_between(begin, end)
        if first == last:
            return
        columns = (self.numbers, self.begins, self.size_bytes, self.source_codes, self.target_codes)
        facts = (
            *(column[first:last].tolist() for column in columns),
            self.padded[first:last].astype(bool).tolist(),
        )
        if self.terms is None:
            yield from starmap(TaskCopy, zip(*facts, self.sources.parts(first, last), strict=True))
            return
        gathers = self.terms.gathers[self.terms.start[[first, last]]].tolist()
        terms = self.terms.terms(first, last, self.sources.parts(*gathers))
        yield from starmap(_sum_of, zip(*facts, terms, strict=True))


def _sum_of(*facts: Any) -> TaskCopy:
    """A copy of such facts and terms; where nothing is to be computed, of the elements as they are."""
    terms = facts[-1]
    copy = TaskCopy._make((*facts[:-1], (), ()))
    (code, sources), *_ = terms[0].gathers
    if len(terms) == 1 and terms[0].is_the_elements and code == copy.target_code:
        return copy._replace(sources=sources)
    return copy._replace(terms=terms)
