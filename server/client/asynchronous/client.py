"""`AsyncClient`: the service from a script, a notebook or a pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import anyio

from dcp.server.client import calls
from dcp.server.client.asynchronous.admin import AsyncAdministration
from dcp.server.client.asynchronous.connection import AsyncPages
from dcp.server.client.calls import (
    CheckpointQuery,
    DiffQuery,
    DownloadQuery,
    ShardMapQuery,
    StoredChunksQuery,
)
from dcp.server.client.downloads import OnBytes
from dcp.server.client.events import EventStream
from dcp.server.client.results import array_of, ended, joined_diff, joined_statistics, late, next_pause
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
from dcp.server.records.drawings import SavePhases, ShardMap, TensorGrid, TensorStatistics
from dcp.server.records.jobs import Job, JobEvent, JobLogLine, JobTask, JobThroughput
from dcp.server.records.labels import Alias, Lineage, Series
from dcp.server.records.roots import Root
from dcp.server.records.runs import Run, RunTimeline
from dcp.server.records.search import CheckpointFacets, SearchHit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["AsyncClient"]


class AsyncClient(AsyncAdministration):
    """The service at ``url``; a context manager::

        async with AsyncClient("https://catalog:8470", key="dcp_...") as client:
            async for checkpoint in client.checkpoints(run="llama/7", sort="metric:loss"):
                print(checkpoint.step, checkpoint.metrics)

    ``key`` is by default the environment's ``DCP_CATALOG_KEY``. ``timeout_seconds`` bounds each wait for the
    network; what fails in passing is tried again, ``retries`` times. ``verify`` and ``transport`` are
    httpx's. All errors are `dcp.server.client.ClientError`.
    """

    # -- the catalog -----------------------------------------------------------------------------------------

    async def whoami(self) -> Whoami:
        """Who this client is, and what it may."""
        return await self._send(calls.whoami())

    async def roots(self) -> list[Root]:
        """The roots that the key may see."""
        return await self._send(calls.roots())

    async def root(self, name: str) -> Root:
        """One root."""
        return await self._send(calls.root(name))

    def runs(
        self,
        *,
        root: str | None = None,
        contains: str | None = None,
        glob: str | None = None,
        sort: str = "-latest",
        page_size: int = 100,
    ) -> AsyncPages[Run]:
        """Runs, the one with the newest checkpoint first."""
        return AsyncPages(self._send, calls.runs(root, contains, glob, sort), page_size)

    async def run(self, run_id: int) -> Run:
        """One run."""
        return await self._send(calls.run(run_id))

    async def run_series(self, run_id: int, metric: str, *, points: int = 200) -> Series:
        """A metric over the steps of a run, in so many points at most, of one checkpoint or several each."""
        return await self._send(calls.run_series(run_id, metric, points))

    async def run_timeline(
        self,
        run_id: int,
        *,
        metric: str | Sequence[str] = (),
        points: int = 300,
        min_step: int | None = None,
        max_step: int | None = None,
    ) -> RunTimeline:
        """The checkpoints of a run over its steps, in so many bins at most: bytes, seconds of saving, states,
        aliases, and these metrics."""
        return await self._send(calls.run_timeline(run_id, metric, points, min_step, max_step))

    async def run_drift(self, run_id: int) -> RunDrift:
        """How its tensors change from step to step, as a job found last. NotFoundError before the first
        `compute_drift`."""
        return await self._send(calls.run_drift(run_id))

    async def compute_drift(self, run_id: int) -> Job:
        """Have it computed of up to 50 steps, by a job; `submit` with the kind "drift" chooses them."""
        return await self._send(calls.compute_drift(run_id))

    async def run_tensor_bytes(
        self, run_id: int, *, only: str | Sequence[str] = (), below_step: int | None = None
    ) -> TensorBytes:
        """What the tensors whose names match take in the checkpoints of a run with a step below that: those
        of optimizers, if nothing else is said."""
        return await self._send(calls.run_tensor_bytes(run_id, only, below_step))

    def checkpoints(
        self, *, page_size: int = 100, **query: Unpack[CheckpointQuery]
    ) -> AsyncPages[Checkpoint]:
        """Checkpoints, the newest first or by ``sort``; see `CheckpointQuery`."""
        return AsyncPages(self._send, calls.checkpoints(query), page_size)

    async def checkpoint(self, checkpoint_id: int) -> CheckpointDetail:
        """All that is known of one."""
        return await self._send(calls.checkpoint(checkpoint_id))

    async def lookup(
        self,
        *,
        uri: str | None = None,
        key: str | None = None,
        run: str | None = None,
        step: int | None = None,
        alias: str | None = None,
        root: str | None = None,
    ) -> CheckpointDetail:
        """The checkpoint under a ``uri`` or ``key``, or that of a ``run`` with this ``step`` or ``alias``; of
        a run alone its latest step. Of several a committed one, and the newest."""
        query = {"uri": uri, "key": key, "run": run, "step": step, "alias": alias, "root": root}
        return await self._send(calls.lookup(query))

    async def checkpoint_facets(
        self, *, values: int = 20, **query: Unpack[CheckpointQuery]
    ) -> CheckpointFacets:
        """How many checkpoints `checkpoints` would have with each value of its filters."""
        return await self._send(calls.checkpoint_facets(query, values))

    async def search(self, text: str, *, kind: str | Sequence[str] = (), limit: int = 10) -> list[SearchHit]:
        """Runs, checkpoints, aliases, tags and tensors with ``text`` in their names, the best first: up to
        ``limit`` of each kind."""
        return list((await self._send(calls.search(text, kind, limit))).items)

    async def register(
        self,
        key: str,
        *,
        root: str | None = None,
        root_url: str | None = None,
        step: int | None = None,
        tags: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        deleted: bool | None = None,
    ) -> Registered:
        """Have the service look at the checkpoint ``key`` of a root (or below a URL that is in one) now."""
        body = {"key": key, "root": root, "root_url": root_url, "step": step, "deleted": deleted}
        labels = {"tags": list(tags) or None, "metrics": dict(metrics) if metrics else None}
        return await self._send(calls.register(body | labels))

    async def lineage(self, checkpoint_id: int) -> Lineage:
        """What it was made of, and what was made of it."""
        return await self._send(calls.lineage(checkpoint_id))

    # -- labels: with ``etag`` only if it is still in that version -------------------------------------------

    async def add_tag(self, checkpoint_id: int, tag: str, *, etag: str | None = None) -> CheckpointDetail:
        """Give a tag; one that it has is fine."""
        return await self._send(calls.tag("PUT", checkpoint_id, tag, etag))

    async def remove_tag(self, checkpoint_id: int, tag: str, *, etag: str | None = None) -> CheckpointDetail:
        """Take a tag away; one that it has not is fine."""
        return await self._send(calls.tag("DELETE", checkpoint_id, tag, etag))

    async def pin(self, checkpoint_id: int, *, etag: str | None = None) -> CheckpointDetail:
        """Neither retention nor anybody deletes it."""
        return await self._send(calls.pin("PUT", checkpoint_id, etag))

    async def unpin(self, checkpoint_id: int, *, etag: str | None = None) -> CheckpointDetail:
        """It may be deleted again."""
        return await self._send(calls.pin("DELETE", checkpoint_id, etag))

    async def set_metrics(
        self, checkpoint_id: int, metrics: Mapping[str, float | None], *, etag: str | None = None
    ) -> CheckpointDetail:
        """Set metrics; None takes one away."""
        return await self._send(calls.metrics(checkpoint_id, metrics, etag))

    async def aliases(self, run_id: int) -> list[Alias]:
        """The aliases of a run."""
        return await self._send(calls.aliases(run_id))

    async def alias(self, run_id: int, name: str) -> Alias:
        """One alias."""
        return await self._send(calls.alias(run_id, name))

    async def set_alias(
        self,
        run_id: int,
        name: str,
        checkpoint_id: int,
        *,
        etag: str | None = None,
        is_protected: bool | None = None,
    ) -> Alias:
        """Let the alias name this checkpoint. One that there is already is moved with its ``etag`` only."""
        return await self._send(calls.set_alias(run_id, name, checkpoint_id, etag, is_protected))

    async def delete_alias(self, run_id: int, name: str, *, etag: str) -> None:
        """Remove an alias; the checkpoint stays."""
        await self._send(calls.delete_alias(run_id, name, etag))

    async def delete(
        self, checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
    ) -> CheckpointDetail:
        """Delete a checkpoint: its bytes stay, and it can be restored, until the grace is over."""
        return await self._send(calls.delete(checkpoint_id, grace_seconds, etag))

    async def restore(self, checkpoint_id: int, *, etag: str | None = None) -> CheckpointDetail:
        """Take a deletion back."""
        return await self._send(calls.restore(checkpoint_id, etag))

    # -- what is in a checkpoint -----------------------------------------------------------------------------

    async def files(self, checkpoint_id: int) -> list[File]:
        """Its own files, as they are in the storage."""
        return await self._send(calls.files(checkpoint_id))

    def tensors(
        self,
        checkpoint_id: int,
        *,
        glob: str | None = None,
        kind: str | None = None,
        dtype: str | None = None,
        page_size: int = 500,
    ) -> AsyncPages[Tensor]:
        """Tensors and values by name."""
        return AsyncPages(self._send, calls.tensors(checkpoint_id, glob, kind, dtype), page_size)

    def tensor_tree(
        self, checkpoint_id: int, prefix: str = "", *, page_size: int = 500
    ) -> AsyncPages[TreeNode]:
        """One level of the tree that the dots in the names make."""
        return AsyncPages(self._send, calls.tensor_tree(checkpoint_id, prefix), page_size)

    async def tensor(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> npt.NDArray[np.generic]:
        """The values of one tensor, or of a ``slice`` such as "0:2,:,-1" of it; float32 for what numpy has no
        type for."""
        return array_of(await self._bytes(calls.tensor_data(checkpoint_id, fqn, slice, "npy")))

    async def tensor_bytes(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> bytes:
        """The same as a safetensors file, in the tensor's own type."""
        return await self._bytes(calls.tensor_data(checkpoint_id, fqn, slice, "safetensors"))

    def shards(
        self, checkpoint_id: int, *, glob: str | None = None, page_size: int = 500
    ) -> AsyncPages[ShardedTensor]:
        """How tensors are cut, and which rank has what."""
        return AsyncPages(self._send, calls.shards(checkpoint_id, glob), page_size)

    def rank_shares(self, checkpoint_id: int, *, page_size: int = 500) -> AsyncPages[RankShare]:
        """How much each rank wrote."""
        return AsyncPages(self._send, calls.rank_shares(checkpoint_id), page_size)

    async def shard_map(self, checkpoint_id: int, **query: Unpack[ShardMapQuery]) -> ShardMap:
        """Which rank holds what and where, added up: rows of files by rank, bins of bytes."""
        return await self._send(calls.shard_map(checkpoint_id, query))

    def stored_chunks(
        self, checkpoint_id: int, *, page_size: int = 500, **query: Unpack[StoredChunksQuery]
    ) -> AsyncPages[StoredChunk]:
        """The chunks of the map one by one, by rank, file and place."""
        return AsyncPages(self._send, calls.stored_chunks(checkpoint_id, query), page_size)

    async def phases(
        self,
        checkpoint_id: int,
        *,
        rows: int = 256,
        first_rank: int | None = None,
        last_rank: int | None = None,
    ) -> SavePhases:
        """How long the phases of its save took, with the ranks in so many rows at most."""
        return await self._send(calls.phases(checkpoint_id, rows, first_rank, last_rank))

    async def tensor_grid(
        self,
        checkpoint_id: int,
        fqn: str,
        slice: str | None = None,
        *,
        rows: int = 128,
        columns: int = 128,
        value: str | Sequence[str] = (),
    ) -> TensorGrid:
        """A tensor, or a slice of it that leaves two dimensions, in so many cells at most: "mean", "min",
        "max", "abs_max" and "nonfinite" of each, or those in ``value``."""
        call = calls.tensor_grid(checkpoint_id, fqn, slice, rows, columns, value)
        return await self._send(call)

    async def tensor_statistics(self, checkpoint_id: int, fqn: str) -> TensorStatistics:
        """Of one tensor: those that a job has computed, or read now if it is not large."""
        return await self._send(calls.tensor_statistics(checkpoint_id, fqn))

    async def diff(self, checkpoint_id: int, before: int, **query: Unpack[DiffQuery]) -> Diff:
        """What differs from the checkpoint ``before``, by structure and checksums; no tensor is read. With
        ``basis="values"`` by how much, as the job "diff" has found last; see `DiffQuery`."""
        return joined_diff(
            await self._joined(lambda cursor: calls.diff_page(checkpoint_id, before, query, cursor))
        )

    async def will_it_load(
        self,
        checkpoint_id: int,
        *,
        state_of: int | None = None,
        shapes_job: int | None = None,
        tensors: Mapping[str, tuple[Sequence[int] | None, str | None]] | None = None,
        objects: Iterable[str] | None = None,
        map: str | None = None,
        inverse: bool = False,
        below: str | None = None,
    ) -> LoadCheck:
        """Whether it fills a state, as far as names, shapes and dtypes tell, and the ``rename=`` that mends
        it: that of the checkpoint ``state_of``, the model that a job "shapes" has made of a config.json, or
        ``tensors``, shapes and dtypes by name (None is not compared) with the names of other values. Through
        the ready weight map ``map``, as `dcp.weight_map` has it."""
        through = {"map": map, "inverse": inverse or None, "below": below}
        call = calls.will_it_load(checkpoint_id, state_of, shapes_job, tensors, objects, through)
        return await self._send(call)

    async def statistics(self, checkpoint_id: int) -> Statistics:
        """Of its values, as they were computed last. NotFoundError before the first `compute_statistics`."""
        return joined_statistics(
            await self._joined(lambda cursor: calls.statistics_page(checkpoint_id, cursor))
        )

    async def compute_statistics(self, checkpoint_id: int) -> Job:
        """Have them computed, by a job."""
        return await self._send(calls.compute(checkpoint_id, "statistics"))

    async def verifications(self, checkpoint_id: int) -> list[Verification]:
        """The last verifications, newest first."""
        return await self._send(calls.verifications(checkpoint_id))

    async def verify(self, checkpoint_id: int) -> Job:
        """Have every byte read and compared, by a job."""
        return await self._send(calls.compute(checkpoint_id, "verifications"))

    # -- downloads -------------------------------------------------------------------------------------------

    async def download(
        self,
        checkpoint_id: int,
        target: str | os.PathLike[str],
        *,
        resume: bool = True,
        overwrite: bool = False,
        on_bytes: OnBytes | None = None,
        **options: Unpack[DownloadQuery],
    ) -> Path:
        """The checkpoint as one file: ``format`` "safetensors" or "torch"; see `DownloadQuery`.

        ``target`` appears when all of it is there; what came before a failure is kept beside it, and the next
        call goes on from there if the checkpoint is still the same. Raises DownloadError for a download that
        breaks off again and again, FileExistsError, OSError.
        """
        call = calls.download(checkpoint_id, options)
        return await self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    async def download_file(
        self,
        checkpoint_id: int,
        name: str,
        target: str | os.PathLike[str],
        *,
        resume: bool = True,
        overwrite: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> Path:
        """One of the checkpoint's own files as it is; from S3 directly, where the service allows that."""
        call = calls.download_file(checkpoint_id, name)
        return await self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    # -- jobs ------------------------------------------------------------------------------------------------

    async def submit(self, kind: str, params: Mapping[str, Any], *, priority: int = 0) -> Job:
        """Have something done: "convert", "merge", "verify", "stats", "diff", "delete", "scan" and others,
        with the parameters of the kind. If an unfinished job does the same already, that one."""
        return await self._send(calls.submit(kind, params, priority))

    async def merge(
        self, sources: Sequence[int], target_key: str, *, to: str, priority: int = 0, **params: Any
    ) -> Job:
        """Have the weighted sum of checkpoints written, by a job; ``params`` are ``weights``, ``formula`` or
        ``decay``, ``adapters`` (their numbers), ``target_root`` and the others of the kind "merge". Without
        ``sources`` it is of a run's newest steps: ``run_id``, and how many are ``last``."""
        given = {"sources": list(sources), "target_key": target_key, "to": to, **params}
        return await self._send(calls.submit("merge", given, priority))

    async def scan(self, root: str, *, below: str = "", accept_lost: int = 0) -> Job:
        """Have a root, or a folder in it, looked through now, by a job.

        ``accept_lost``: up to so many checkpoints that are not found are gone for good (`Root.lost`).
        """
        return await self._send(calls.scan(root, below, accept_lost))

    def jobs(
        self,
        *,
        state: str | Sequence[str] | None = None,
        kind: str | Sequence[str] | None = None,
        root: str | None = None,
        checkpoint_id: int | None = None,
        created_by: str | None = None,
        scans: bool = False,
        page_size: int = 100,
    ) -> AsyncPages[Job]:
        """Jobs, newest first; with ``scans`` also those that the service makes by itself, one a minute."""
        query = {"state": state, "kind": kind, "root": root, "checkpoint_id": checkpoint_id}
        return AsyncPages(
            self._send, calls.jobs(query | {"created_by": created_by, "scans": scans or None}), page_size
        )

    async def job(self, job_id: int) -> Job:
        """One job."""
        return await self._send(calls.job(job_id))

    def job_tasks(self, job_id: int, *, page_size: int = 500) -> AsyncPages[JobTask]:
        """What it consists of."""
        return AsyncPages(self._send, calls.job_tasks(job_id), page_size)

    async def job_throughput(self, job_id: int) -> JobThroughput:
        """How fast it is, and how long it still takes."""
        return await self._send(calls.job_throughput(job_id))

    async def job_log(self, job_id: int, *, lines: int = 100) -> list[JobLogLine]:
        """What happened to it last, as sentences, in their order; 500 lines at most."""
        return await self._send(calls.job_log(job_id, lines))

    async def cancel(self, job_id: int) -> Job:
        """Stop it; again is fine."""
        return await self._send(calls.job_action(job_id, "cancel"))

    async def retry(self, job_id: int) -> Job:
        """Begin a job anew that has failed or was cancelled."""
        return await self._send(calls.job_action(job_id, "retry"))

    async def wait(
        self,
        job: Job | int,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[Job], None] | None = None,
    ) -> Job:
        """The job once it has succeeded.

        Raises JobFailedError, JobCancelledError, and WaitTimeoutError if it has not ended in time (it goes
        on).
        """
        job_id = job if isinstance(job, int) else job.id
        begun, pause = time.monotonic(), 0.0
        while True:
            found = await self.job(job_id)
            if on_progress is not None:
                on_progress(found)
            if found.is_final:
                return ended(found)
            pause = next_pause(pause)
            if timeout_seconds is not None and time.monotonic() - begun + pause > timeout_seconds:
                raise late(found, timeout_seconds)
            await anyio.sleep(pause)

    def watch(self, job_id: int, *, after_id: int | None = None) -> AsyncIterator[JobEvent]:
        """What happens to a job, from its beginning (or behind the event ``after_id``) to its end, as it
        happens. A connection that breaks is made again, and nothing is missed."""
        return self._watch(f"/jobs/{job_id}/events", EventStream(after_id))

    def watch_jobs(self, *, after_id: int | None = None, scans: bool = False) -> AsyncIterator[JobEvent]:
        """What happens to all jobs, from now on (or behind the event ``after_id``), without end; with
        ``scans`` also to those that the service makes by itself."""
        return self._watch(f"/jobs/events{'?scans=true' if scans else ''}", EventStream(after_id))

    # -- anything else ---------------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        etag: str | None = None,
    ) -> Any:
        """A request for which there is no method, such as ``request("GET", "/audit")``: the JSON of the
        answer."""
        return await self._send(calls.plain(method, path, params or {}, body, etag))
