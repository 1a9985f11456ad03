"""What copies are sums of, as columns, where a conversion computes: see `dcp.conversion.merging`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.conversion.layouts.pieces import SourcePart
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.ragged import expand_ranges

__all__ = ["Gather", "MergedTensors", "TensorTerms", "Term", "TermColumns"]


@dataclass(frozen=True, eq=False)
class TensorTerms:
    """What tensors are sums of: the terms of the tensor in row n are rows ``start[n]`` to ``start[n + 1]``,
    in the order in which they are added.

    Each is, times its one of ``weights``, the tensor in the source's row ``lefts`` or, with ``ranks``, the
    product of that and the one in row ``rights``, whose inner size that is. ``turned``: it is stored as the
    product the other way round, so that rows are columns of both.
    """

    start: Int64
    weights: npt.NDArray[np.float64]
    lefts: Int64
    rights: Int64
    ranks: Int64
    turned: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, count: int, rows: Int64, *columns: npt.NDArray[Any]) -> TensorTerms:
        """The terms of ``count`` tensors; ``rows`` says by term which it is of."""
        order = np.argsort(rows, kind="stable")
        return cls(starts(np.bincount(rows, minlength=count)), *(column[order] for column in columns))

    def products(self, tensor: int) -> list[tuple[Any, ...]]:
        """The terms of a tensor that are products."""
        own = slice(int(self.start[tensor]), int(self.start[tensor + 1]))
        columns = (self.weights, self.lefts, self.rights, self.ranks, self.turned)
        return [term for term in zip(*(column[own].tolist() for column in columns), strict=True) if term[3]]

    @property
    def identity(self) -> bytes:
        """Equal for the same terms."""
        columns = (self.start, self.weights, self.lefts, self.rights, self.ranks, self.turned)
        return b"".join(column.tobytes() for column in columns)


@dataclass(frozen=True, eq=False)
class MergedTensors:
    """The ``terms`` of tensors, by row of the first source, which are rows of all of them joined and are
    added in the type of code ``accumulate``. ``unmerged`` are those taken from the first as they are, by new
    name; ``origin`` is for the provenance. With weight maps terms are of the tensors ``mapped``, which are
    made of those of all sources joined, and have their rows."""

    terms: TensorTerms
    accumulate: int
    unmerged: tuple[str, ...]
    origin: Mapping[str, Any]
    mapped: Sequence[MappedTensor] = ()

    @property
    def identity(self) -> str:
        """Equal for merges that compute the same of the same sources."""
        digest = hashlib.sha256(self.terms.identity)
        pieces = [(tensor.shape, tensor.pieces) for tensor in self.mapped]
        digest.update(repr((self.accumulate, pieces)).encode())
        return digest.hexdigest()


class Gather(NamedTuple):
    """Elements of the source, in C order, of the type ``code``."""

    code: int
    sources: tuple[SourcePart, ...]


class Term(NamedTuple):
    """What is added, times ``weight``: the elements of the one gather or, with a ``rank``, the product of
    two: rows of ``rank`` elements, and ``rank`` rows of ``width``."""

    weight: float
    rank: int
    width: int
    gathers: tuple[Gather, ...]

    @property
    def is_the_elements(self) -> bool:
        """Whether nothing is computed."""
        return self.weight == 1.0 and not self.rank


@dataclass(frozen=True, eq=False)
class TermColumns:
    """`Term`s of copies: those of copy n are rows ``start[n]`` to ``start[n + 1]``; ``codes`` are by gather.
    They are added in the type ``accumulate``, in this order."""

    accumulate: int
    start: Int64
    weights: npt.NDArray[np.float64]
    ranks: Int64
    widths: Int64
    codes: Int64

    @cached_property
    def gathers(self) -> Int64:
        """The first gather of each row."""
        return starts(1 + (self.ranks > 0))

    def fewest(self, elements: Int64) -> Int64:
        """By copy, of the gathers that are no factors, which have so many ``elements``."""
        whole = np.where(self.ranks > 0, np.iinfo(np.int64).max, elements[self.gathers[:-1]])
        return np.minimum.reduceat(whole, self.start[:-1]) if len(whole) else whole

    def gathers_of(self, copies: Int64) -> Int64:
        """The numbers of their gathers, in order."""
        begins, ends = self.gathers[self.start[copies]], self.gathers[self.start[copies + 1]]
        return expand_ranges(begins, ends - begins)

    def take(self, copies: Int64) -> TermColumns:
        """Those of ``copies``, in that order."""
        counts = self.start[copies + 1] - self.start[copies]
        rows = expand_ranges(self.start[copies], counts)
        return TermColumns(
            self.accumulate,
            starts(counts),
            self.weights[rows],
            self.ranks[rows],
            self.widths[rows],
            self.codes[self.gathers_of(copies)],
        )

    def terms(
        self, first: int, last: int, parts: Iterator[tuple[SourcePart, ...]]
    ) -> Iterator[tuple[Term, ...]]:
        """The terms of the copies ``first`` to ``last``, copy by copy; ``parts`` are of their gathers."""
        codes = iter(self.codes[self.gathers[self.start[first]] :].tolist())
        for begin, end in pairwise(self.start[first : last + 1].tolist()):
            columns = (self.weights, self.ranks, self.widths)
            yield tuple(
                Term(
                    weight,
                    rank,
                    width,
                    tuple(Gather(next(codes), next(parts)) for _ in range(2 if rank else 1)),
                )
                for weight, rank, width in zip(*(one[begin:end].tolist() for one in columns), strict=True)
            )
