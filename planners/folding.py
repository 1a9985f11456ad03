"""One rank's folds: 64 bits over what the replica check looks at, for each set of ranks that share rows.

Most tensors are small and lie where they lay at the last save, so views of their memory are kept and joined,
and checksums are asked for hundreds of tensors at once: a fifth of the time of two calls a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp.planners.columns import SaveColumns
from dcp.planners.digest import ReplicaCheck, compared_bytes, compared_ranges, digest_parts, memory_between
from dcp.planners.item_views import item_views
from dcp.planners.known_state import Sources
from dcp.planners.replica_sets import RankSets
from dcp.planners.tensor_facts import TensorFacts
from dcp.storage.formats.index import Int64

__all__ = ["SetFolder"]

_JOINED_BYTES = 256 << 10
"""Views are joined up to this size, so that the checksums read from the core's cache."""


@dataclass(frozen=True, eq=False)
class _Memory:
    """Where the rows lie, in the order of ``RankSets.item_rows``, and the facts of their tensors, strides and
    sizes among them. ``token`` is the `Sources.memory` that vouches for all that."""

    addresses: Int64
    facts: TensorFacts
    token: object | None


@dataclass(eq=False)
class _Set:
    """The buffers of one set in order, the runs of them that are joined, and by position the rows whose bytes
    have to be copied each time, each a run by itself."""

    buffers: list[Any] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)


class SetFolder:
    """Folds the rows of `RankSets` at each save.

    Views of memory are kept from save to save. They are read only after the tensors at hand, which the caller
    holds, were found to lie at the same addresses with the same facts, or their `Sources.memory` said so.
    """

    def __init__(self, sets: RankSets, columns: SaveColumns, check: ReplicaCheck) -> None:
        self._sets = sets
        self._columns = columns
        self._check: ReplicaCheck = check
        self._memory: _Memory | None = None
        self._prepared: list[_Set] = []

    def folds(
        self, sources: Sequence[torch.Tensor], object_digests: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """The fold of each set, in the order of their numbers."""
        sets = self._sets
        token = sources.memory if isinstance(sources, Sources) else None
        if self._memory is None or token is None or self._memory.token is not token:
            self._look_at(item_views(self._columns, sources, sets.item_rows), token)
        copies = self._copies(sources)
        folds = np.zeros(len(sets.numbers), np.uint64)
        for number, prepared in enumerate(self._prepared):
            objects = sets.object_rows[sets.object_start[number] : sets.object_start[number + 1]]
            digests = object_digests[objects].tobytes()
            folds[number] = digest_parts(chain(_parts(prepared, copies), [digests]))
        return folds

    def _copies(self, sources: Sequence[torch.Tensor]) -> Callable[[int], bytes]:
        """The bytes of a row that has no view."""

        def copy(rows: list[int]) -> list[bytes]:
            views = item_views(self._columns, sources, self._sets.item_rows[rows])
            return compared_bytes(views, self._check)

        if self._check == "full":  # of all together there may be too much for the host
            return lambda row: copy([row])[0]
        rows = [row for prepared in self._prepared for row in prepared.copied.values()]
        return dict(zip(rows, copy(rows), strict=True)).__getitem__ if rows else lambda row: b""

    def _look_at(self, views: list[torch.Tensor], token: object | None) -> None:
        known, count = self._memory, len(views)
        addresses = np.fromiter(map(torch.Tensor.data_ptr, views), np.int64, count)
        if known is not None and np.array_equal(known.addresses, addresses) and known.facts.are_of(views):
            self._memory = replace(known, token=token)
            return
        self._memory = _Memory(addresses, TensorFacts(views), token)
        on_host = [view.is_cpu and view.is_contiguous() for view in views]
        self._prepared = self._prepare(addresses, [view.nbytes for view in views], on_host)

    def _prepare(self, addresses: Int64, sizes: list[int], on_host: list[bool]) -> list[_Set]:
        filled = np.array(on_host, bool) & (np.array(sizes, np.int64) > 0)
        low = int(addresses[filled].min(initial=np.iinfo(np.int64).max))
        high = int((addresses + sizes)[filled].max(initial=0))
        memory = memory_between(low, high) if low < high else memoryview(b"")
        begins = (addresses - low).tolist()
        prepared = []
        for first, last in pairwise(self._sets.item_start.tolist()):
            part = _Set()
            for row in range(first, last):
                if not on_host[row]:
                    part.copied[len(part.buffers)] = row
                    part.buffers.append(b"")
                elif sizes[row]:
                    begin = begins[row]
                    ranges = compared_ranges(sizes[row], self._check)
                    part.buffers += [memory[begin + start : begin + end] for start, end in ranges]
            part.runs = _runs(part)
            prepared.append(part)
        return prepared


def _runs(part: _Set) -> list[tuple[int, int]]:
    """Neighbours are joined up to `_JOINED_BYTES`; what is large, or copied later, stays alone."""
    runs, begin, joined = [], 0, 0
    for position, buffer in enumerate(part.buffers):
        size = _JOINED_BYTES if position in part.copied else len(buffer)
        if joined + size > _JOINED_BYTES and begin < position:
            runs.append((begin, position))
            begin, joined = position, 0
        joined += size
    return [*runs, (begin, len(part.buffers))] if part.buffers else []


def _parts(part: _Set, copies: Callable[[int], bytes]) -> Iterator[Any]:
    for begin, end in part.runs:
        if begin in part.copied:
            yield copies(part.copied[begin])
        else:
            yield part.buffers[begin] if end - begin == 1 else b"".join(part.buffers[begin:end])
