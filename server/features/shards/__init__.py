"""Shards: the map of a checkpoint, and lists of ranks, tensors and chunks; in the API and as pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Query
from pydantic import Field, StringConstraints

from dcp.server.catalog.cursors import encode_cursor, offset_of, query_mark
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import Paged, Text
from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.catalog.names import check_pattern
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.access import SharedValues, Stamped
from dcp.server.core.data.responses import NOT_MODIFIED
from dcp.server.core.feature import Feature, Link
from dcp.server.core.http.dependencies import PageQuery
from dcp.server.core.pages.formatting import bytes_text, count_text, times_text
from dcp.server.core.pages.requests import query_of
from dcp.server.core.problems import UnprocessableError
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import Shown
from dcp.server.records.lists import Page

feature: Final = Feature(
    "shards",
    __name__,
    web=["anatomy"],
    links=[
        Link("checkpoint", "Shards by rank", "/checkpoints/{id}/shards"),
        Link("checkpoint", "Save anatomy", "/checkpoints/{id}/anatomy"),
    ],
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Box of a tensor, and the file with its bytes."""

    rank: Annotated[int | None, Shown("Rank in the name of the file; null: none.")]
    file: str
    offsets: Annotated[tuple[int, ...], Shown("Start of the box in the tensor, by dimension.")]
    sizes: Annotated[tuple[int, ...], Shown("Lengths of the box, by dimension.")]
    bytes: int
    file_offset: Annotated[int | None, Shown("Position of the first byte in the file; null: unknown.")] = None


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """Tensor and its boxes; ``chunks`` are the first of ``chunk_count``."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunk_count: Annotated[int, Shown("Number of boxes.")]
    chunks: Annotated[tuple[Chunk, ...], Shown("The first 4,096 of them.")]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Box of a tensor, and the position of its bytes."""

    fqn: str
    dtype: str
    rank: Annotated[int | None, Shown("Rank in the name of the file; null: none.")]
    file: str
    file_offset: Annotated[int, Shown("Position of the first byte in the file.")]
    bytes: int
    offsets: Annotated[tuple[int, ...], Shown("Start of the box in the tensor, by dimension.")]
    sizes: Annotated[tuple[int, ...], Shown("Lengths of the box, by dimension.")]
    copies: Annotated[int | None, Shown("Copies of this box; null: too many chunks to compare.")]


@dataclass(frozen=True, slots=True)
class RankShare:
    """Files of a rank; ``rank`` None: files without a rank in their names."""

    rank: Annotated[int | None, Shown("null: files without a rank in their names.")]
    files: Annotated[int, Shown("Number of files.")]
    file_bytes: Annotated[int | None, Shown("Size of the files; null: unknown.")]
    chunks: Annotated[int, Shown("Number of boxes of tensors.")]
    tensors: Annotated[int, Shown("Number of tensors with a box here.")]
    tensor_bytes: Annotated[int, Shown("Bytes of the boxes.")]


@dataclass(frozen=True, slots=True)
class ShardMapRow:
    """Files of adjacent ranks. ``rank`` None: files without a rank in their names."""

    first_rank: Annotated[int | None, Shown("null: files without a rank in their names.")]
    last_rank: Annotated[int | None, Shown("null: files without a rank in their names.")]
    file: Annotated[str, Shown("The first of them.")]
    files: Annotated[int, Shown("Number of files.")]
    file_bytes: Annotated[int | None, Shown("null: not known.")]
    tensor_bytes: Annotated[int, Shown("Bytes of tensors.")]
    largest_rank_bytes: Annotated[int, Shown("Largest bytes of a rank.")]
    replicated_bytes: Annotated[int, Shown("Bytes of tensors stored more than once.")]
    chunks: Annotated[int, Shown("Of tensors, in them.")]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Map of shards: rows of files by rank, with bins of ``bin_bytes`` from ``begin``.

    Nonempty cells are columns of equal length: row, bin, bytes and chunks of tensors, and the largest tensor:
    indexes of its name in ``names`` and its dtype in ``dtypes``.
    """

    rank_count: Annotated[int, Shown("Number of ranks with files.")]
    file_count: int
    begin: Annotated[int, Shown("First byte of the range in each file.")]
    end: Annotated[int, Shown("End of the range, exclusive.")]
    bin_bytes: Annotated[int, Shown("Bytes of a bin.")]
    bins: Annotated[int, Shown("Number of bins.")]
    largest_rank: Annotated[int | None, Shown("Rank with the most bytes of tensors.")]
    largest_rank_bytes: Annotated[int, Shown("Bytes of tensors of the largest rank.")]
    mean_rank_bytes: Annotated[float, Shown("Mean bytes of tensors of a rank.")]
    rows: tuple[ShardMapRow, ...]
    names: Annotated[tuple[str, ...], Shown("Names of tensors, for `cell_names`.")]
    name_bytes: Annotated[tuple[int, ...], Shown("By name: bytes stored by all ranks.")]
    name_layers: Annotated[tuple[int | None, ...], Shown("By name: number of the layer, if any.")]
    is_replicated: Annotated[tuple[bool, ...], Shown("By name: stored more than once.")]
    dtypes: Annotated[tuple[str, ...], Shown("Dtypes, for `cell_dtypes`.")]
    cell_rows: Annotated[tuple[int, ...], Shown("By cell that has bytes: index in `rows`.")]
    cell_bins: Annotated[tuple[int, ...], Shown("By cell: number of the bin.")]
    cell_bytes: Annotated[tuple[int, ...], Shown("By cell: bytes of tensors.")]
    cell_chunks: Annotated[tuple[int, ...], Shown("By cell: number of boxes.")]
    cell_names: Annotated[tuple[int, ...], Shown("Places in names: the tensor with the most bytes.")]
    cell_dtypes: Annotated[tuple[int, ...], Shown("Index in dtypes of the tensor.")]


@dataclass(frozen=True, slots=True)
class SavePhase:
    """Phase of a save, over all ranks with a record. ``within``: the enclosing phase.

    ``is_blocking``: training waited for the phase.
    """

    name: str
    within: Annotated[str | None, Shown("Enclosing phase.")]
    is_blocking: Annotated[bool, Shown("Training waited for the phase.")]
    ranks: Annotated[int, Shown("That recorded it.")]
    min_seconds: Annotated[float, Shown("Time of the fastest rank.")]
    median_seconds: float
    max_seconds: Annotated[float, Shown("Time of the slowest rank.")]
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Neighbouring ranks; ``seconds`` are by phase, of the slowest of them, in the order of the phases."""

    first_rank: int
    last_rank: int
    slowest_rank: Annotated[int, Shown("Rank with the longest total of phases.")]
    total_seconds: Annotated[float, Shown("Seconds of the slowest rank in all top-level phases.")]
    seconds: Annotated[tuple[float | None, ...], Shown("By phase: seconds of the slowest rank.")]


@dataclass(frozen=True, slots=True)
class SavePhases:
    """Seconds of the phases of a save, by rank; none where the writer recorded none.

    ``blocking_seconds`` and ``background_seconds`` are of the slowest rank in each phase.
    """

    rank_count: Annotated[int, Shown("Ranks with recorded timings.")]
    phases: tuple[SavePhase, ...]
    rows: tuple[PhaseRow, ...]
    blocking_seconds: Annotated[float, Shown("Sum of the slowest ranks in phases that training waited for.")]
    background_seconds: Annotated[float, Shown("Sum of the slowest ranks in the other phases.")]
    assemble_seconds: Annotated[float | None, Shown("Of the coordinator, for the index.")]


Rank = Annotated[int, Field(ge=0, lt=1 << 31)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 62)]
_SHARDS: Final = "/checkpoints/{checkpoint_id}/shards"
_ERRORS: Final = (400, 401, 403, 404, 409, 410, 421, 422, 429, 503)
_PAGE_CHUNKS: Final = 20_000
_ROWS: Final = 64
_CHUNKS: Final = 100
_LARGE: Final = 500_000
"""Chunks: an index with more takes too long to read for a page."""
_SAME: Final = 1.005
_EVEN: Final = 1.05
"""Ratio to the mean that still counts as balanced."""


class _Selection(QueryModel):
    first_rank: Annotated[Rank | None, Field(description="Lowest rank whose files are included.")] = None
    last_rank: Annotated[Rank | None, Field(description="Highest rank whose files are included.")] = None
    begin: Annotated[_Offset, Field(description="First byte of the range in each file.")] = 0
    end: Annotated[
        _Offset | None, Field(description="End of the range, exclusive. Default: end of the longest file.")
    ] = None
    glob: Annotated[
        Annotated[Text, StringConstraints(min_length=1, max_length=256)] | None,
        Field(description="Glob for names of tensors; * matches any characters."),
    ] = None

    def check(self) -> None:
        """Raise UnprocessableError or InvalidQueryError for an impossible part."""
        if self.end is not None and self.end <= self.begin:
            raise UnprocessableError("end must be greater than begin", field="end")
        if self.glob is not None:
            check_pattern("glob", self.glob)


class ShardMapQuery(_Selection):
    """Ranks, bytes, and tensors of a map, and the number of its cells."""

    rows: Annotated[int, Field(ge=1, le=512, description="Maximum rows of files.")] = 128
    bins: Annotated[int, Field(ge=1, le=512, description="As many bins of bytes at most.")] = 64


class StoredChunksQuery(_Selection, Paged):
    """The ranks, bytes and tensors of a list of chunks."""


@dataclass(frozen=True, eq=False)
class OpenChunks(Stamped):
    """Chunks of a checkpoint, and the writer's notes on the save."""

    columns: Any
    provenance: Mapping[str, Any]

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the chunks."""
        return int(self.columns.held_bytes)


class KeptChunks:
    """Chunks of recently shown checkpoints, also with indexes too large to keep:
    ``service.own(KeptChunks)``."""

    def __init__(self, _service: object) -> None:
        # five million chunks take 90 MiB
        self._values = SharedValues[Stamped, OpenChunks](count=16, kept_bytes=128 << 20)

    def has(self, ask: Ask, checkpoint_id: int) -> bool:
        """Return True if `get` answers without a read. Raises as `Data.open`."""
        return self._values.find(ask.data.find(checkpoint_id).state) is not None

    def get(self, ask: Ask, checkpoint_id: int) -> OpenChunks:
        """Return the chunks of a checkpoint. Raises as `Data.open` does."""
        state = ask.data.find(checkpoint_id).state
        return self._values.get(state, lambda: self._read(ask, checkpoint_id))

    def _read(self, ask: Ask, checkpoint_id: int) -> OpenChunks:
        from dcp.server.features.shards.chunks import ChunkColumns  # imports numpy

        opened = ask.data.open(checkpoint_id).opened
        columns = ChunkColumns(opened.index)
        return OpenChunks(opened.root, opened.key, opened.stamp, columns, opened.index.provenance)


@feature.get(_SHARDS, tag="data", errors=_ERRORS)
def list_shards(
    checkpoint_id: IdPath,
    ask: Ask,
    page: PageQuery,
    glob: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=256,
            description="Glob for names of tensors; * matches any characters.",
            examples=["layers.*.weight"],
        ),
    ] = None,
) -> Page[ShardedTensor]:
    """List tensors with their boxes, and the rank and file of each box.

    A page ends early at tensors with many chunks.
    """
    from dcp.server.features.shards.chunks import sharded_tensors

    opened = ask.data.open(checkpoint_id).opened
    mark = query_mark("shards", checkpoint_id, opened.stamp, glob)
    after = offset_of(page.cursor, mark, -1)
    shown: list[ShardedTensor] = []
    chunks = 0
    for row, tensor in sharded_tensors(opened.index, after_row=after, glob=glob):
        if len(shown) == page.limit or (shown and chunks + len(tensor.chunks) > _PAGE_CHUNKS):
            return Page(tuple(shown), encode_cursor(mark, after))
        shown.append(tensor)
        after = row
        chunks += len(tensor.chunks)
    return Page(tuple(shown), None)


@feature.get(_SHARDS + "/ranks", tag="data", errors=_ERRORS)
def list_rank_shares(checkpoint_id: IdPath, ask: Ask, page: PageQuery) -> Page[RankShare]:
    """List files, bytes, chunks, and tensors of each rank."""
    from dcp.server.features.shards.chunks import rank_shares

    opened = ask.data.open(checkpoint_id).opened
    mark = query_mark("ranks", checkpoint_id, opened.stamp)
    begin = offset_of(page.cursor, mark)
    shares, end = rank_shares(opened.index), begin + page.limit
    return Page(tuple(shares[begin:end]), encode_cursor(mark, end) if end < len(shares) else None)


@feature.get(_SHARDS + "/map", tag="data", errors=(412, *_ERRORS), responses=NOT_MODIFIED)
def get_shard_map(checkpoint_id: IdPath, query: Annotated[ShardMapQuery, Query()], ask: Ask) -> ShardMap:
    """Return the map of shards: rows of files by rank, bins of bytes, and the largest tensor in each bin."""
    query.check()
    found = ask.service.own(KeptChunks).get(ask, checkpoint_id)
    ask.tag(found.etag("map", query))
    return _map_of(found, query)


def _map_of(found: OpenChunks, query: ShardMapQuery) -> ShardMap:
    """Return the map of the part in ``query``."""
    from dcp.server.features.shards.shard_map import shard_map  # imports numpy

    return shard_map(found.columns, **query.model_dump())


@feature.get(_SHARDS + "/chunks", tag="data", errors=_ERRORS)
def list_stored_chunks(
    checkpoint_id: IdPath, query: Annotated[StoredChunksQuery, Query()], ask: Ask
) -> Page[StoredChunk]:
    """List chunks of the map by rank, file, and position, with numbers of copies."""
    from dcp.server.features.shards.chunks import stored_chunks

    query.check()
    found = ask.service.own(KeptChunks).get(ask, checkpoint_id)
    part = query.model_dump(exclude={"limit", "cursor"})
    mark = query_mark("chunks", checkpoint_id, found.stamp, sorted(part.items(), key=str))
    after = offset_of(query.cursor, mark, -1)
    index = ask.data.open(checkpoint_id).opened.index
    chunks = stored_chunks(found.columns, index, after=after, limit=query.limit + 1, **part)
    shown = tuple(chunk for _, chunk in chunks[: query.limit])
    is_last = len(chunks) == len(shown)
    return Page(shown, None if is_last else encode_cursor(mark, chunks[query.limit - 1][0]))


# -- pages ---------------------------------------------------------------------------------------------------


class ShardsView(_Selection):
    """The shown part of the map: ranks, bytes of their files, tensors with ``glob`` in their names."""

    glob: Annotated[str, Field(max_length=254)] | None = None
    colour: Literal["layer", "dtype", "bytes"] = "layer"
    wait: Annotated[bool, Field(description="Wait for slow answers.")] = False
    cursor: Annotated[str, Field(max_length=4096)] | None = None

    @property
    def part(self) -> dict[str, Any]:
        """Part, in the names of the API's query."""
        given = self.model_dump(include={"first_rank", "last_rank", "begin", "end"}, exclude_none=True)
        given = {name: value for name, value in given.items() if value or name != "begin"}
        return given | ({"glob": f"*{self.glob}*"} if self.glob else {})

    def values(self, found: CheckpointDetail, path: str) -> dict[str, Any]:
        """Return the common values of both pages; the JSON of the part is at ``path`` below the shards."""
        query = f"?{urlencode(self.part)}" if self.part else ""
        return {"found": found, "view": self, "twin": f"/api/v1/checkpoints/{found.id}/shards/{path}{query}"}


@feature.page(_SHARDS, "shards.html")
def shards_page(checkpoint_id: IdPath, view: Annotated[ShardsView, Query()], ask: Ask) -> dict[str, Any]:
    """Show the map, drawn by a script that loads finer bins; the bytes of each rank as text and as a
    table."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    shown = None
    if not is_late(ask, found, waits=view.wait):
        query = query_of(ShardMapQuery, **view.part, rows=_ROWS, bins=1)
        query.check()
        shown = _map_of(ask.service.own(KeptChunks).get(ask, checkpoint_id), query)
    return {
        **view.values(found, "map"),
        "is_late": shown is None,
        "map": shown,
        "balance": None if shown is None else _balance(shown, found.world_size, is_whole=not view.part),
    }


@feature.page(_SHARDS + "/chunks", "chunks.html")
def chunks_page(checkpoint_id: IdPath, view: Annotated[ShardsView, Query()], ask: Ask) -> dict[str, Any]:
    """Return the chunks as a table: tensors, boxes, places."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    chunks = None
    if not is_late(ask, found, waits=view.wait, with_boxes=True):
        query = query_of(StoredChunksQuery, **view.part, limit=_CHUNKS, cursor=view.cursor)
        chunks = list_stored_chunks(found.id, query, ask)
    return {
        **view.values(found, "chunks"),
        "is_late": chunks is None,
        "chunks": chunks.items if chunks else (),
        "next_cursor": chunks.next_cursor if chunks else None,
    }


def is_late(ask: Ask, found: CheckpointDetail, *, waits: bool, with_boxes: bool = False) -> bool:
    """Return True if the page loads the index's content later, because reading takes long; False with
    ``waits``, and in the request for this content."""
    is_large = (found.tensor_count or 0) * (found.world_size or 1) > _LARGE
    if not is_large or waits or "hx-request" in ask.request.headers:
        return False
    return with_boxes or not ask.service.own(KeptChunks).has(ask, found.id)


def _balance(found: ShardMap, world_size: int | None, *, is_whole: bool) -> list[str]:
    """Return sentences on the bytes of the ranks; ranks without bytes only for a whole map."""
    if found.largest_rank is None or not found.mean_rank_bytes:
        return ["The file names do not show which rank wrote them."] if found.rows else []
    sentences = [_share(found)]
    silent = (world_size or 0) - found.rank_count
    if is_whole and silent > 0:
        sentences.append(f"{count_text(silent)} of {count_text(world_size)} ranks wrote nothing.")
    replicated = sum(row.replicated_bytes for row in found.rows)
    if replicated:
        sentences.append(f"{bytes_text(replicated)} belong to tensors stored more than once.")
    return sentences


def _share(found: ShardMap) -> str:
    mean, ratio = bytes_text(found.mean_rank_bytes), found.largest_rank_bytes / found.mean_rank_bytes
    if found.rank_count == 1:
        return f"Rank {found.largest_rank} wrote all bytes, {bytes_text(found.largest_rank_bytes)}."
    if ratio < _SAME:
        return f"All {count_text(found.rank_count)} ranks wrote the same amount: {mean}."
    if ratio < _EVEN:
        return (
            f"All ranks wrote about the same amount: {mean} each, at most {times_text(ratio)} times the mean."
        )
    return (
        f"Rank {found.largest_rank} wrote {times_text(ratio)} times the mean: "
        f"{bytes_text(found.largest_rank_bytes)}; the mean is {mean}."
    )
