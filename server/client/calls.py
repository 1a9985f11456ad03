"""What can be asked of the service, as values: method, path, query and body, and what the answer means.

Pure: `Client` and `AsyncClient` send these, each in its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from dcp.server.client.errors import AnswerError
from dcp.server.features.drift.records import RunDrift
from dcp.server.records.administration import TensorBytes, Whoami
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail, Registered
from dcp.server.records.contents import (
    Diff,
    File,
    LoadCheck,
    RankShare,
    ShardedTensor,
    Statistics,
    StoredChunk,
    Tensor,
    TreeNode,
    Verification,
)
from dcp.server.records.documents import record_of
from dcp.server.records.drawings import SavePhases, ShardMap, TensorGrid, TensorStatistics
from dcp.server.records.jobs import Job, JobLogLine, JobTask, JobThroughput
from dcp.server.records.labels import Alias, Lineage, Series
from dcp.server.records.roots import Root
from dcp.server.records.runs import Run, RunTimeline
from dcp.server.records.search import CheckpointFacets, SearchResult

__all__ = [
    "API",
    "Call",
    "CheckpointQuery",
    "DiffQuery",
    "DownloadQuery",
    "PagedCall",
    "ShardMapQuery",
    "StoredChunksQuery",
    "calls_of_page",
    "if_match",
    "many",
    "nothing",
    "one",
    "params",
]

API = "/api/v1"

T = TypeVar("T")
Params = tuple[tuple[str, str], ...]


class CheckpointQuery(TypedDict, total=False):
    """Which checkpoints: all that is given holds; of several formats, states and verifications any, of tags
    and metrics all. Without ``state`` only committed ones; "any" are all."""

    root: str
    run_id: int
    run: str
    run_contains: str
    run_glob: str
    min_step: int
    max_step: int
    since: datetime
    until: datetime
    format: str | Sequence[str]
    state: str | Sequence[str]
    verification: str | Sequence[str]
    tag: str | Sequence[str]
    alias: str
    metric: str | Sequence[str]
    dtype: str
    tensor: str
    name_contains: str
    name_glob: str
    pinned: bool
    sort: str


class DownloadQuery(TypedDict, total=False):
    """What of a checkpoint is in a file, and how: names by globs, floating-point tensors as ``dtype``."""

    format: str
    only: str | Sequence[str]
    exclude: str | Sequence[str]
    dtype: str
    drop_objects: bool


class StoredChunksQuery(TypedDict, total=False):
    """Which ranks, which bytes of each file and which tensors."""

    first_rank: int
    last_rank: int
    begin: int
    end: int
    glob: str


class ShardMapQuery(StoredChunksQuery, total=False):
    """The same, in how many rows and bins at most."""

    rows: int
    bins: int


class DiffQuery(TypedDict, total=False):
    """On which ``basis``: "values" as the job "diff" has found last, "checksums" or "structure". Which
    tensors: of some kinds, or whose names match; in which ``order``."""

    basis: str | None
    kind: str | Sequence[str]
    glob: str
    order: str


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request; ``parse`` makes of the JSON of its answer (None if it has no body) what is returned.

    ``only_reads``: a POST that changes nothing. ``has_secret``: the answer does, and is given once only.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Params = ()
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    only_reads: bool = False
    has_secret: bool = False

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be sent again although the first one may have been carried out."""
        return "If-Match" not in self.headers and not self.has_secret


@dataclass(frozen=True, slots=True)
class PagedCall(Generic[T]):
    """Requests for page after page of a list; with a ``body`` they are POSTs, which change nothing."""

    path: str
    item: Callable[[Any], T]
    params: Params = ()
    body: Any = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page, and the cursor of the next one."""

    items: list[T]
    next_cursor: str | None


def calls_of_page(paged: PagedCall[T], limit: int, cursor: str | None) -> Call[Page[T]]:
    """The request for one page of ``limit`` items at most."""

    def parse(document: Any) -> Page[T]:
        items, more = _items(document), document.get("next_cursor")
        return Page([paged.item(item) for item in items], more if isinstance(more, str) else None)

    query = (*paged.params, *params(limit=limit, cursor=cursor))
    method = "GET" if paged.body is None else "POST"
    return Call(method, paged.path, parse, query, paged.body, only_reads=True)


def params(**values: Any) -> Params:
    """A query: None is left out, sequences become several, times are written as the service wants them."""
    return tuple(
        (name, _text(each))
        for name, value in values.items()
        for each in ([value] if isinstance(value, str) or not isinstance(value, Iterable) else value)
        if each is not None
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; use datetime(..., tzinfo=UTC)")
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value)


def _items(document: Any) -> list[Any]:
    items = document.get("items") if isinstance(document, Mapping) else None
    if not isinstance(items, list):
        raise AnswerError("the service answered with no list")
    return items


def decode(kind: type[T], document: Any) -> T:
    """The record that an answer has. Raises AnswerError."""
    try:
        return record_of(kind, document)
    except ValueError as error:
        raise AnswerError(f"the service answered with what is no {kind.__name__}: {error}") from error


def one(kind: type[T]) -> Callable[[Any], T]:
    """Parses an answer that is one of ``kind``."""
    return partial(decode, kind)


def many(kind: type[T]) -> Callable[[Any], list[T]]:
    """Parses an answer that has ``items``, all of them."""
    return lambda document: [decode(kind, item) for item in _items(document)]


def nothing(document: Any) -> None:
    """Parses an answer without a body."""


def if_match(etag: str | None) -> dict[str, str]:
    """The header that lets a change be refused if it is not that version any more."""
    if etag is None:
        return {}
    return {"If-Match": etag if etag == "*" or etag.startswith('"') else f'"{etag}"'}


def _label(name: str) -> str:
    return quote(name, safe="/:@+=-._")


# -- the catalog ---------------------------------------------------------------------------------------------

_DETAIL = one(CheckpointDetail)


def whoami() -> Call[Whoami]:
    return Call("GET", "/whoami", one(Whoami))


def roots() -> Call[list[Root]]:
    return Call("GET", "/roots", many(Root))


def root(name: str) -> Call[Root]:
    return Call("GET", f"/roots/{quote(name, safe='')}", one(Root))


def runs(root: str | None, contains: str | None, glob: str | None, sort: str) -> PagedCall[Run]:
    return PagedCall("/runs", one(Run), params(root=root, contains=contains, glob=glob, sort=sort))


def run_series(run_id: int, metric: str, points: int) -> Call[Series]:
    query = params(metric=metric, points=points)
    return Call("GET", f"/runs/{run_id}/series", one(Series), params=query)


def run_timeline(
    run_id: int, metric: str | Sequence[str], points: int, min_step: int | None, max_step: int | None
) -> Call[RunTimeline]:
    query = params(metric=metric, points=points, min_step=min_step, max_step=max_step)
    return Call("GET", f"/runs/{run_id}/timeline", one(RunTimeline), params=query)


def run_drift(run_id: int) -> Call[RunDrift]:
    return Call("GET", f"/runs/{run_id}/drift", one(RunDrift))


def compute_drift(run_id: int) -> Call[Job]:
    return Call("POST", f"/runs/{run_id}/drift", one(Job))


def run_tensor_bytes(run_id: int, only: str | Sequence[str], below_step: int | None) -> Call[TensorBytes]:
    query = params(only=only, below_step=below_step)
    return Call("GET", f"/runs/{run_id}/tensor-bytes", one(TensorBytes), params=query)


def run(run_id: int) -> Call[Run]:
    return Call("GET", f"/runs/{run_id}", one(Run))


def checkpoints(query: CheckpointQuery) -> PagedCall[Checkpoint]:
    return PagedCall("/checkpoints", one(Checkpoint), params(**query))


def checkpoint_facets(query: CheckpointQuery, values: int) -> Call[CheckpointFacets]:
    given = {name: value for name, value in query.items() if name != "sort"}
    return Call("GET", "/checkpoints/facets", one(CheckpointFacets), params(**given, values=values))


def lookup(query: Mapping[str, Any]) -> Call[CheckpointDetail]:
    return Call("GET", "/checkpoints/lookup", _DETAIL, params(**query))


def search(text: str, kind: str | Sequence[str], limit: int) -> Call[SearchResult]:
    return Call("GET", "/search", one(SearchResult), params(q=text, kind=kind, limit=limit))


def checkpoint(checkpoint_id: int) -> Call[CheckpointDetail]:
    return Call("GET", f"/checkpoints/{checkpoint_id}", _DETAIL)


def register(body: Mapping[str, Any]) -> Call[Registered]:
    given = {name: value for name, value in body.items() if value is not None}
    return Call("POST", "/checkpoints", one(Registered), body=given)


def lineage(checkpoint_id: int) -> Call[Lineage]:
    return Call("GET", f"/checkpoints/{checkpoint_id}/lineage", one(Lineage))


# -- labels --------------------------------------------------------------------------------------------------


def tag(method: str, checkpoint_id: int, name: str, etag: str | None) -> Call[CheckpointDetail]:
    path = f"/checkpoints/{checkpoint_id}/tags/{_label(name)}"
    return Call(method, path, _DETAIL, headers=if_match(etag))


def pin(method: str, checkpoint_id: int, etag: str | None) -> Call[CheckpointDetail]:
    return Call(method, f"/checkpoints/{checkpoint_id}/pin", _DETAIL, headers=if_match(etag))


def metrics(
    checkpoint_id: int, values: Mapping[str, float | None], etag: str | None
) -> Call[CheckpointDetail]:
    path = f"/checkpoints/{checkpoint_id}/metrics"
    return Call("PATCH", path, _DETAIL, body={"metrics": dict(values)}, headers=if_match(etag))


def aliases(run_id: int) -> Call[list[Alias]]:
    return Call("GET", f"/runs/{run_id}/aliases", many(Alias))


def alias(run_id: int, name: str) -> Call[Alias]:
    return Call("GET", f"/runs/{run_id}/aliases/{_label(name)}", one(Alias))


def set_alias(
    run_id: int, name: str, checkpoint_id: int, etag: str | None, is_protected: bool | None
) -> Call[Alias]:
    body = {"checkpoint_id": checkpoint_id, "is_protected": is_protected}
    path = f"/runs/{run_id}/aliases/{_label(name)}"
    return Call("PUT", path, one(Alias), body=body, headers=if_match(etag))


def delete_alias(run_id: int, name: str, etag: str) -> Call[None]:
    return Call("DELETE", f"/runs/{run_id}/aliases/{_label(name)}", nothing, headers=if_match(etag))


# -- what is in a checkpoint ---------------------------------------------------------------------------------


def files(checkpoint_id: int) -> Call[list[File]]:
    return Call("GET", f"/checkpoints/{checkpoint_id}/files", many(File))


def tensors(checkpoint_id: int, glob: str | None, kind: str | None, dtype: str | None) -> PagedCall[Tensor]:
    path = f"/checkpoints/{checkpoint_id}/tensors"
    return PagedCall(path, one(Tensor), params(glob=glob, kind=kind, dtype=dtype))


def tensor_tree(checkpoint_id: int, prefix: str) -> PagedCall[TreeNode]:
    path = f"/checkpoints/{checkpoint_id}/tensors/tree"
    return PagedCall(path, one(TreeNode), params(prefix=prefix))


def shards(checkpoint_id: int, glob: str | None) -> PagedCall[ShardedTensor]:
    return PagedCall(f"/checkpoints/{checkpoint_id}/shards", one(ShardedTensor), params(glob=glob))


def rank_shares(checkpoint_id: int) -> PagedCall[RankShare]:
    return PagedCall(f"/checkpoints/{checkpoint_id}/shards/ranks", one(RankShare))


def stored_chunks(checkpoint_id: int, query: StoredChunksQuery) -> PagedCall[StoredChunk]:
    return PagedCall(f"/checkpoints/{checkpoint_id}/shards/chunks", one(StoredChunk), params(**query))


def phases(checkpoint_id: int, rows: int, first_rank: int | None, last_rank: int | None) -> Call[SavePhases]:
    query = params(rows=rows, first_rank=first_rank, last_rank=last_rank)
    return Call("GET", f"/checkpoints/{checkpoint_id}/phases", one(SavePhases), query)


def shard_map(checkpoint_id: int, query: ShardMapQuery) -> Call[ShardMap]:
    return Call("GET", f"/checkpoints/{checkpoint_id}/shards/map", one(ShardMap), params(**query))


def tensor_grid(
    checkpoint_id: int, fqn: str, slice: str | None, rows: int, columns: int, value: str | Sequence[str]
) -> Call[TensorGrid]:
    query = params(fqn=fqn, slice=slice, rows=rows, columns=columns, value=value)
    return Call("GET", f"/checkpoints/{checkpoint_id}/tensors/grid", one(TensorGrid), query)


def tensor_statistics(checkpoint_id: int, fqn: str) -> Call[TensorStatistics]:
    path = f"/checkpoints/{checkpoint_id}/tensors/statistics"
    return Call("GET", path, one(TensorStatistics), params(fqn=fqn))


def diff_page(
    checkpoint_id: int, before: int, query: DiffQuery, cursor: str | None
) -> Call[tuple[Diff, str | None]]:
    path = f"/checkpoints/{checkpoint_id}/diff"

    def parse(document: Any) -> tuple[Diff, str | None]:
        return decode(Diff, document), document.get("next_cursor")

    return Call("GET", path, parse, params(before=before, **query, limit=500, cursor=cursor))


def will_it_load(
    checkpoint_id: int,
    state_of: int | None,
    shapes_job: int | None,
    tensors: Mapping[str, tuple[Sequence[int] | None, str | None]] | None,
    objects: Iterable[str] | None,
    through: Mapping[str, Any],
) -> Call[LoadCheck]:
    path = f"/checkpoints/{checkpoint_id}/will-it-load"
    if tensors is None:
        asked = params(state_of=state_of, shapes_job=shapes_job, **through)
        return Call("GET", path, one(LoadCheck), asked)
    named = [
        {"fqn": fqn, "shape": None if shape is None else list(shape), "dtype": dtype}
        for fqn, (shape, dtype) in tensors.items()
    ]
    body = {"tensors": named, "objects": None if objects is None else list(objects)}
    return Call("POST", path, one(LoadCheck), params(**through), body=body, only_reads=True)


def statistics_page(checkpoint_id: int, cursor: str | None) -> Call[tuple[Statistics, str | None]]:
    path = f"/checkpoints/{checkpoint_id}/statistics"

    def parse(document: Any) -> tuple[Statistics, str | None]:
        return decode(Statistics, document), document.get("next_cursor")

    return Call("GET", path, parse, params(limit=500, cursor=cursor))


def verifications(checkpoint_id: int) -> Call[list[Verification]]:
    return Call("GET", f"/checkpoints/{checkpoint_id}/verifications", many(Verification))


# -- jobs ----------------------------------------------------------------------------------------------------

_JOB = one(Job)


def submit(kind: str, job_params: Mapping[str, Any], priority: int) -> Call[Job]:
    return Call("POST", "/jobs", _JOB, body={"kind": kind, "params": dict(job_params), "priority": priority})


def scan(root: str, below: str, accept_lost: int) -> Call[Job]:
    accepted = {"accept_lost": accept_lost} if accept_lost else {}  # which an older service does not know
    return submit("scan", {"root": root, "below": below, **accepted}, 0)


def jobs(query: Mapping[str, Any]) -> PagedCall[Job]:
    return PagedCall("/jobs", _JOB, params(**query))


def job(job_id: int) -> Call[Job]:
    return Call("GET", f"/jobs/{job_id}", _JOB)


def job_action(job_id: int, action: str) -> Call[Job]:
    return Call("POST", f"/jobs/{job_id}/{action}", _JOB)


def job_tasks(job_id: int) -> PagedCall[JobTask]:
    return PagedCall(f"/jobs/{job_id}/tasks", one(JobTask))


def job_throughput(job_id: int) -> Call[JobThroughput]:
    return Call("GET", f"/jobs/{job_id}/throughput", one(JobThroughput))


def job_log(job_id: int, lines: int) -> Call[list[JobLogLine]]:
    return Call("GET", f"/jobs/{job_id}/log", many(JobLogLine), params(limit=lines))


def plain(method: str, path: str, query: Mapping[str, Any], body: Any, etag: str | None) -> Call[Any]:
    return Call(method, path, lambda document: document, params(**query), body, if_match(etag))


def delete(checkpoint_id: int, grace_seconds: float | None, etag: str | None) -> Call[CheckpointDetail]:
    path, query = f"/checkpoints/{checkpoint_id}", params(grace_seconds=grace_seconds)
    return Call("DELETE", path, _DETAIL, query, headers=if_match(etag))


def restore(checkpoint_id: int, etag: str | None) -> Call[CheckpointDetail]:
    return Call("POST", f"/checkpoints/{checkpoint_id}/restore", _DETAIL, headers=if_match(etag))


def compute(checkpoint_id: int, what: str) -> Call[Job]:
    return Call("POST", f"/checkpoints/{checkpoint_id}/{what}", _JOB)


# -- bytes ---------------------------------------------------------------------------------------------------


def tensor_data(checkpoint_id: int, fqn: str, slice: str | None, form: str) -> Call[None]:
    path = f"/checkpoints/{checkpoint_id}/tensors/data"
    return Call("GET", path, nothing, params(fqn=fqn, slice=slice, format=form))


def download(checkpoint_id: int, query: DownloadQuery) -> Call[None]:
    return Call("GET", f"/checkpoints/{checkpoint_id}/download", nothing, params(**query))


def download_file(checkpoint_id: int, name: str) -> Call[None]:
    return Call("GET", f"/checkpoints/{checkpoint_id}/files/{quote(name, safe='')}", nothing)
