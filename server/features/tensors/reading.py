"""A tensor of a checkpoint, found and ready to be read, for its pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlencode

from fastapi import Depends, Query

from dcp.server.catalog.details import CheckpointDetail
from dcp.server.catalog.values import short_name
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.access import Readable
from dcp.server.features.statistics.web import kept_statistics
from dcp.server.records.drawings import TensorStatistics

if TYPE_CHECKING:
    from dcp.server.records.contents import ShardedTensor

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "NamedDep", "NamedTensor", "statistics_of"]

SMALL_BYTES: Final = 1 << 20
"""Read while a page is made; a page loads what takes longer by a request of its own."""
LARGE_BYTES: Final = 64 << 20
_MAX_GLOB: Final = 256


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor that is ready to be read. ``fqn`` is its name in the catalog, ``of`` has its chunks."""

    found: CheckpointDetail
    readable: Readable
    fqn: str
    row: int
    of: ShardedTensor

    @property
    def elements(self) -> int:
        """The elements of the whole tensor."""
        return math.prod(self.of.shape)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all its chunks."""
        index = self.readable.opened.index
        chunks = index.chunks(self.row)
        return int(index.payload_lengths[chunks.start : chunks.stop].sum())

    @property
    def is_plain(self) -> bool:
        """Whether lists can be filtered by its name: the API would not take it for a glob."""
        return len(self.fqn) <= _MAX_GLOB and not any(sign in self.fqn for sign in "*?[")

    @property
    def twin(self) -> str:
        """The path of its statistics; of a tensor that is too large to be read that of its chunks."""
        if self.stored_bytes <= LARGE_BYTES or not self.is_plain:
            path, query = "tensors/statistics", {"fqn": self.fqn}
        else:
            path, query = "shards", {"glob": self.fqn}
        return f"/api/v1/checkpoints/{self.found.id}/{path}?{urlencode(query)}"

    def url(self, path: str = "", **query: str) -> str:
        """The path of the page of the tensor, or of one below it."""
        return f"/checkpoints/{self.found.id}/tensors{path}?{urlencode({'fqn': self.fqn, **query})}"


def _named(
    checkpoint_id: IdPath, fqn: Annotated[str, Query(min_length=1, max_length=4096)], ask: AskDep
) -> NamedTensor:
    from dcp.server.features.shards.listing import sharded_tensors  # only here, as all that reads tensors

    readable = ask.data.open(checkpoint_id)
    row = readable.opened.row(fqn)
    _, tensor = next(sharded_tensors(readable.opened.index, after_row=row - 1))
    return NamedTensor(readable.row, readable, short_name(tensor.fqn), row, tensor)


NamedDep = Annotated[NamedTensor, Depends(_named)]


def statistics_of(
    ask: Ask, readable: Readable, fqn: str, most_bytes: int, *, with_histogram: bool = False
) -> TensorStatistics | None:
    """The statistics that a job has computed; without any, or without the histogram that is wanted, those of
    the tensor as it is now, if it has at most ``most_bytes``. None for a larger one."""
    from dcp.server.features.tensors.grids import tensor_statistics

    kept = kept_statistics(ask, readable.row.id, fqn)
    if kept is not None and not (with_histogram and (kept.statistics or {}).get("histogram") is None):
        return kept
    index = readable.opened.index
    row = readable.opened.row(fqn)
    if math.prod(index.shape(row)) * index.dtype(row).itemsize > most_bytes:
        return kept
    with readable.problems():
        return tensor_statistics(readable.opened, fqn)
