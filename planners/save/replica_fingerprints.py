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

from dcp.planners.cache.known_state import Sources
from dcp.planners.columns import SaveColumns
from dcp.planners.layout.item_views import item_views
from dcp.planners.layout.tensor_facts import TensorFacts
from dcp.planners.save.digest import (
    ReplicaCheck,
    compared_bytes,
    compared_ranges,
    digest_parts,
    memory_between,
)
from dcp.planners.save.replica_sets import RankSets
from dcp.storage.formats.index import Int64

__all__ = ["SetFolder"]

_KEPT_MEMORIES = 2
"""Two saves in flight have two staging buffers, which take turns."""

_JOINED_BYTES = 256 << 10
"""Views are joined up to this size, so that the checksums read from the core's cache."""


@dataclass(eq=False)
class _Set:
    """The buffers of one set in order, the runs of them that are joined, and by position the rows whose bytes
    have to be copied each time, each a run by itself."""

    buffers: list[Any] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Memory:
    """Where rows lie, in the order of ``RankSets.item_rows``, the facts of their tensors (strides and sizes
    among them), and the buffers that follow. ``token`` is the `Sources.memory` that vouches for all that."""

    addresses: Int64
    facts: TensorFacts
    token: object | None
    prepared: list[_Set]


class SetFolder:
    """Folds the rows of `RankSets` at each save.

    Views of memory are kept from save to save. They are read only after the tensors at hand, which the caller
    holds, were found to lie at the same addresses with the same facts, or their `Sources.memory` said so.
    """

    def __init__(self, sets: RankSets, columns: SaveColumns, check: ReplicaCheck) -> None:
        self._sets = sets
        self._columns = columns
        self._check: ReplicaCheck = check
        self._memories: list[_Memory] = []

    def prepare(self, sources: Sequence[torch.Tensor]) -> None:
        """Have views of ``sources`` ready for the next save, which most likely brings them again."""
        self._at(sources)

    def folds(
        self, sources: Sequence[torch.Tensor], object_digests: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """The fold of each set, in the order of their numbers."""
        sets = self._sets
        prepared = self._at(sources).prepared
        copies = self._copies(sources, prepared)
        folds = np.zeros(len(sets.numbers), np.uint64)
        for number, part in enumerate(prepared):
            objects = sets.object_rows[sets.object_start[number] : sets.object_start[number + 1]]
            digests = object_digests[objects].tobytes()
            folds[number] = digest_parts(chain(_parts(part, copies), [digests]))
        return folds

    def _copies(self, sources: Sequence[torch.Tensor], prepared: Sequence[_Set]) -> Callable[[int], bytes]:
        """The bytes of a row that has no view."""

        def copy(rows: list[int]) -> list[bytes]:
            views = item_views(self._columns, sources, self._sets.item_rows[rows])
            return compared_bytes(views, self._check)

        if self._check == "full":  # of all together there may be too much for the host
            return lambda row: copy([row])[0]
        rows = [row for part in prepared for row in part.copied.values()]
        return dict(zip(rows, copy(rows), strict=True)).__getitem__ if rows else lambda row: b""

    def _at(self, sources: Sequence[torch.Tensor]) -> _Memory:
        """Where ``sources`` lie, known from before or found out."""
        token = sources.memory if isinstance(sources, Sources) else None
        for known in self._memories:
            if token is not None and known.token is token:
                return known
        views = item_views(self._columns, sources, self._sets.item_rows)
        addresses = np.fromiter(map(torch.Tensor.data_ptr, views), np.int64, len(views))
        for known in self._memories:
            if np.array_equal(known.addresses, addresses) and known.facts.are_of(views):
                return known if token is None else self._keep(replace(known, token=token))
        on_host = [view.is_cpu and view.is_contiguous() for view in views]
        prepared = self._sets_at(addresses, [view.nbytes for view in views], on_host)
        return self._keep(_Memory(addresses, TensorFacts(views), token, prepared))

    def _keep(self, memory: _Memory) -> _Memory:
        self._memories = [memory, *self._memories][:_KEPT_MEMORIES]
        return memory

    def _sets_at(self, addresses: Int64, sizes: list[int], on_host: list[bool]) -> list[_Set]:
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
