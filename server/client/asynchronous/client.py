"""`AsyncClient`: the service from a script, a notebook or a pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import anyio

from dcp.server.client.asynchronous.admin import AsyncAdministration
from dcp.server.client.asynchronous.connection import AsyncPages
from dcp.server.client.calls import json_call
from dcp.server.client.downloads import OnBytes
from dcp.server.client.events import EventStream, JobEvent
from dcp.server.client.generated import models, operations
from dcp.server.client.transport import array_of, joined, next_pause, succeeded, wait_timeout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["AsyncClient"]

_PAGE_SIZE: Final = 500


class AsyncClient(AsyncAdministration):
    """The service at ``url``; a context manager::

        async with AsyncClient("https://catalog:8470", key="dcp_...") as client:
            async for checkpoint in client.checkpoints(run="llama/7", sort="metric:loss"):
                print(checkpoint.step, checkpoint.metrics)

    ``key`` is by default the environment's ``DCP_CATALOG_KEY``. ``timeout_seconds`` bounds each wait for the
    network; what fails in passing is tried again, ``retries`` times. ``verify`` and ``transport`` are
    httpx's. All errors are `dcp.server.client.ClientError`.

    Options of methods, with their meanings and defaults, are those of the API. Changes with an ``etag`` are
    made only if the object is still in that version.
    """

    # -- the catalog -----------------------------------------------------------------------------------------

    async def whoami(self) -> models.Whoami:
        """Get the caller and its scopes."""
        return await self._send(operations.get_whoami())

    async def roots(self) -> list[models.Root]:
        """List the roots that the key may see."""
        return await self._send(operations.list_roots())

    async def root(self, name: str) -> models.Root:
        """Get one root."""
        return await self._send(operations.get_root(name))

    def runs(self, *, page_size: int = 100, **options: Unpack[models.RunQuery]) -> AsyncPages[models.Run]:
        """List runs, the one with the newest checkpoint first."""
        return AsyncPages(self._send, operations.list_runs(**options), page_size)

    async def run(self, run_id: int) -> models.Run:
        """Get one run."""
        return await self._send(operations.get_run(run_id))

    async def run_series(self, run_id: int, metric: str, *, points: int = 200) -> models.Series:
        """Get a metric over the steps of a run in at most ``points`` points of one or several checkpoints."""
        return await self._send(operations.get_run_series(run_id, metric=metric, points=points))

    async def run_timeline(self, run_id: int, **options: Unpack[models.TimelineQuery]) -> models.RunTimeline:
        """Get the checkpoints of a run over its steps in at most ``points`` bins: bytes, seconds of saving,
        states, aliases, and each ``metric``."""
        return await self._send(operations.get_run_timeline(run_id, **options))

    async def run_drift(self, run_id: int) -> models.RunDrift:
        """Get the changes of the tensors between steps, as a job found them last. Raises NotFoundError before
        the first `compute_drift`."""
        return await self._send(operations.get_run_drift(run_id))

    async def compute_drift(self, run_id: int) -> models.Job:
        """Compute the drift of up to 50 steps by a job; `submit` the kind "drift" to choose the steps."""
        return await self._send(operations.compute_run_drift(run_id))

    async def run_tensor_bytes(
        self, run_id: int, *, only: str | Sequence[str] = (), below_step: int | None = None
    ) -> models.TensorBytes:
        """Get the bytes of the tensors that match ``only`` (by default those of optimizers) in the
        checkpoints of a run below a step."""
        return await self._send(operations.get_run_tensor_bytes(run_id, only=only, below_step=below_step))

    def checkpoints(
        self, *, page_size: int = 100, **query: Unpack[models.CheckpointQuery]
    ) -> AsyncPages[models.Checkpoint]:
        """List checkpoints, the newest first or by ``sort``.

        All options must hold: of several formats, states and verifications any, of tags and metrics all.
        Without ``state`` only committed ones are listed, with "any" all.
        """
        return AsyncPages(self._send, operations.list_checkpoints(**query), page_size)

    async def checkpoint(self, checkpoint_id: int) -> models.CheckpointDetail:
        """Get all that is known of a checkpoint."""
        return await self._send(operations.get_checkpoint(checkpoint_id))

    async def lookup(self, **query: Unpack[models.LookupQuery]) -> models.CheckpointDetail:
        """Get the checkpoint of a ``uri`` or ``key``, or that of a ``run`` with a ``step`` or ``alias``; of a
        run alone the latest step. Of several a committed one is preferred, then the newest."""
        return await self._send(operations.lookup_checkpoint(**query))

    async def checkpoint_facets(
        self, *, values: int = 20, **query: Unpack[models.CheckpointQuery]
    ) -> models.CheckpointFacets:
        """Count the checkpoints that `checkpoints` would list with each value of its filters."""
        filters: dict[str, Any] = {name: value for name, value in query.items() if name != "sort"}
        return await self._send(operations.get_checkpoint_facets(values=values, **filters))

    async def search(
        self, text: str, *, kind: str | Sequence[str] = (), limit: int = 10
    ) -> list[models.SearchHit]:
        """Search the names of runs, checkpoints, aliases, tags and tensors; the best first, and at most
        ``limit`` of each kind."""
        return await self._send(operations.search(q=text, kind=kind, limit=limit))

    async def register(self, key: str, **options: Unpack[models.RegistrationOptions]) -> models.Registered:
        """Make the service look at the checkpoint ``key`` of a ``root``, or below a ``root_url`` in one."""
        return await self._send(operations.register_checkpoint({"key": key, **options}))

    async def lineage(self, checkpoint_id: int) -> models.Lineage:
        """Get the ancestors and descendants of a checkpoint."""
        return await self._send(operations.get_lineage(checkpoint_id))

    # -- labels ----------------------------------------------------------------------------------------------

    async def add_tag(
        self, checkpoint_id: int, tag: str, *, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Add a tag, if the checkpoint does not have it."""
        return await self._send(operations.add_tag(checkpoint_id, tag, etag=etag))

    async def remove_tag(
        self, checkpoint_id: int, tag: str, *, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Remove a tag, if the checkpoint has it."""
        return await self._send(operations.remove_tag(checkpoint_id, tag, etag=etag))

    async def pin(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Protect a checkpoint from deletion."""
        return await self._send(operations.pin_checkpoint(checkpoint_id, etag=etag))

    async def unpin(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Allow the deletion of a checkpoint again."""
        return await self._send(operations.unpin_checkpoint(checkpoint_id, etag=etag))

    async def set_metrics(
        self, checkpoint_id: int, metrics: Mapping[str, float | None], *, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Set metrics; None removes one."""
        return await self._send(operations.change_metrics(checkpoint_id, {"metrics": metrics}, etag=etag))

    async def aliases(self, run_id: int) -> list[models.Alias]:
        """List the aliases of a run."""
        return await self._send(operations.list_aliases(run_id))

    async def alias(self, run_id: int, name: str) -> models.Alias:
        """Get one alias."""
        return await self._send(operations.get_alias(run_id, name))

    async def set_alias(
        self,
        run_id: int,
        name: str,
        checkpoint_id: int,
        *,
        etag: str | None = None,
        is_protected: bool | None = None,
    ) -> models.Alias:
        """Set an alias to a checkpoint. An existing one is moved only with its ``etag``."""
        body = {"checkpoint_id": checkpoint_id, "is_protected": is_protected}
        return await self._send(operations.set_alias(run_id, name, body, etag=etag))

    async def delete_alias(self, run_id: int, name: str, *, etag: str) -> None:
        """Remove an alias; the checkpoint stays."""
        await self._send(operations.delete_alias(run_id, name, etag=etag))

    async def delete(
        self, checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Delete a checkpoint: its bytes stay, and it can be restored, until the grace has passed."""
        call = operations.delete_checkpoint(checkpoint_id, grace_seconds=grace_seconds, etag=etag)
        return await self._send(call)

    async def restore(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Restore a deleted checkpoint."""
        return await self._send(operations.restore_checkpoint(checkpoint_id, etag=etag))

    # -- contents --------------------------------------------------------------------------------------------

    async def files(self, checkpoint_id: int) -> list[models.File]:
        """List the files of a checkpoint in its storage."""
        return await self._send(operations.list_files(checkpoint_id))

    def tensors(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.TensorQuery]
    ) -> AsyncPages[models.Tensor]:
        """List tensors and other values by name."""
        return AsyncPages(self._send, operations.list_tensors(checkpoint_id, **options), page_size)

    def tensor_tree(
        self, checkpoint_id: int, prefix: str = "", *, page_size: int = 500
    ) -> AsyncPages[models.TreeNode]:
        """List one level of the tree that the dots in the names make."""
        return AsyncPages(self._send, operations.tensor_tree(checkpoint_id, prefix=prefix), page_size)

    async def tensor(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> npt.NDArray[np.generic]:
        """Read one tensor, or a ``slice`` of it such as "0:2,:,-1"; as float32 where numpy lacks the type."""
        call = operations.tensor_data(checkpoint_id, fqn=fqn, slice=slice, format="npy")
        return array_of(await self._bytes(call))

    async def tensor_bytes(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> bytes:
        """Read one tensor, or a ``slice`` of it, as a safetensors file in the tensor's own type."""
        call = operations.tensor_data(checkpoint_id, fqn=fqn, slice=slice, format="safetensors")
        return await self._bytes(call)

    def shards(
        self, checkpoint_id: int, *, glob: str | None = None, page_size: int = 500
    ) -> AsyncPages[models.ShardedTensor]:
        """List tensors with their chunks and the ranks that hold them."""
        return AsyncPages(self._send, operations.list_shards(checkpoint_id, glob=glob), page_size)

    def rank_shares(self, checkpoint_id: int, *, page_size: int = 500) -> AsyncPages[models.RankShare]:
        """List what each rank wrote."""
        return AsyncPages(self._send, operations.list_rank_shares(checkpoint_id), page_size)

    async def shard_map(self, checkpoint_id: int, **query: Unpack[models.ShardMapQuery]) -> models.ShardMap:
        """Get a summary of which rank holds what and where: rows of files by rank, bins of bytes."""
        return await self._send(operations.get_shard_map(checkpoint_id, **query))

    def stored_chunks(
        self, checkpoint_id: int, *, page_size: int = 500, **query: Unpack[models.StoredChunksQuery]
    ) -> AsyncPages[models.StoredChunk]:
        """List the chunks of `shard_map` by rank, file and place."""
        return AsyncPages(self._send, operations.list_stored_chunks(checkpoint_id, **query), page_size)

    async def phases(self, checkpoint_id: int, **query: Unpack[models.PhasesQuery]) -> models.SavePhases:
        """Get the seconds that the phases of the save took, with the ranks in at most ``rows`` rows."""
        return await self._send(operations.get_phases(checkpoint_id, **query))

    async def tensor_grid(
        self,
        checkpoint_id: int,
        fqn: str,
        slice: str | None = None,
        *,
        rows: int = 128,
        columns: int = 128,
        value: str | Sequence[str] = (),
    ) -> models.TensorGrid:
        """Get a tensor, or a slice of two dimensions, as at most ``rows`` by ``columns`` cells: "mean",
        "min", "max", "abs_max" and "nonfinite" of each, or those in ``value``."""
        call = operations.get_tensor_grid(
            checkpoint_id, fqn=fqn, slice=slice, rows=rows, columns=columns, value=value
        )
        return await self._send(call)

    async def tensor_statistics(self, checkpoint_id: int, fqn: str) -> models.TensorStatistics:
        """Get statistics of one tensor: computed by a job, or now if it is not large."""
        return await self._send(operations.get_tensor_statistics(checkpoint_id, fqn=fqn))

    async def diff(self, checkpoint_id: int, before: int, **query: Unpack[models.DiffQuery]) -> models.Diff:
        """Get the differences from the checkpoint ``before``, by structure and checksums; no tensor is read.
        With ``basis="values"`` the differences of values that the job "diff" found last."""
        call = operations.diff_checkpoints(checkpoint_id, before=before, limit=_PAGE_SIZE, **query)
        return joined(await self._parts(call))

    async def will_it_load(
        self,
        checkpoint_id: int,
        *,
        tensors: Mapping[str, tuple[Sequence[int] | None, str | None]] | None = None,
        objects: Iterable[str] | None = None,
        **options: Unpack[models.LoadOptions],
    ) -> models.LoadCheck:
        """Check by names, shapes and dtypes whether a checkpoint fills a state, and find a ``rename=``.

        The state is that of the checkpoint ``state_of``, the model that a job "shapes" made of a config.json,
        or ``tensors``, shapes and dtypes by name (None is not compared), with the names ``objects`` of other
        values. The load is through the ready weight map ``map``, as in `dcp.weight_map`.
        """
        if tensors is None:
            return await self._send(operations.check_load_of(checkpoint_id, **options))
        named = [{"fqn": fqn, "shape": shape, "dtype": dtype} for fqn, (shape, dtype) in tensors.items()]
        state = {"tensors": named, "objects": None if objects is None else list(objects)}
        through: dict[str, Any] = {name: options.get(name) for name in ("map", "inverse", "below")}
        return await self._send(operations.check_load_of_state(checkpoint_id, state, **through))

    async def statistics(self, checkpoint_id: int) -> models.Statistics:
        """Get the statistics of all values that were computed last. Raises NotFoundError before the first
        `compute_statistics`."""
        call = operations.get_statistics(checkpoint_id, limit=_PAGE_SIZE)
        return joined(await self._parts(call))

    async def compute_statistics(self, checkpoint_id: int) -> models.Job:
        """Compute statistics of all values by a job."""
        return await self._send(operations.compute_statistics(checkpoint_id))

    async def verifications(self, checkpoint_id: int) -> list[models.Verification]:
        """List the last verifications, newest first."""
        return await self._send(operations.list_verifications(checkpoint_id))

    async def verify(self, checkpoint_id: int) -> models.Job:
        """Verify every byte by a job."""
        return await self._send(operations.verify_checkpoint(checkpoint_id))

    # -- downloads -------------------------------------------------------------------------------------------

    async def download(
        self,
        checkpoint_id: int,
        target: str | os.PathLike[str],
        *,
        resume: bool = True,
        overwrite: bool = False,
        on_bytes: OnBytes | None = None,
        **options: Unpack[models.DownloadQuery],
    ) -> Path:
        """Download a checkpoint as one file: ``format`` "safetensors" or "torch".

        ``target`` appears when all of it is there; what came before a failure is kept beside it, and the next
        call resumes there if the checkpoint is still the same. Raises DownloadError for a download that
        breaks off again and again, FileExistsError, OSError.
        """
        call = operations.download_checkpoint(checkpoint_id, **options)
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
        """Download one of the checkpoint's own files; directly from S3 where the service allows that."""
        call = operations.download_file(checkpoint_id, name)
        return await self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    # -- jobs ------------------------------------------------------------------------------------------------

    async def submit(self, kind: str, params: Mapping[str, Any], *, priority: int = 0) -> models.Job:
        """Submit a job: "convert", "merge", "verify", "stats", "diff", "delete", "scan" or another kind, with
        the parameters of the kind. If an unfinished job does the same already, get that one."""
        return await self._send(operations.submit_job({"kind": kind, "params": params, "priority": priority}))

    async def merge(
        self, sources: Sequence[int], target_key: str, *, to: str, priority: int = 0, **params: Any
    ) -> models.Job:
        """Write the weighted sum of checkpoints by a job; ``params`` are ``weights``, ``formula`` or
        ``decay``, ``adapters`` (their numbers), ``target_root`` and the others of the kind "merge". Without
        ``sources`` it is of a run's newest steps: ``run_id``, and how many are ``last``."""
        params |= {"sources": sources, "target_key": target_key, "to": to}
        return await self.submit("merge", params, priority=priority)

    async def scan(self, root: str, *, below: str = "", accept_lost: int = 0) -> models.Job:
        """Scan a root, or a folder in it, by a job.

        ``accept_lost``: up to so many checkpoints that are not found are gone for good (`Root.lost`).
        """
        accepted = {"accept_lost": accept_lost} if accept_lost else {}  # unknown to an older service
        return await self.submit("scan", {"root": root, "below": below, **accepted})

    def jobs(self, *, page_size: int = 100, **options: Unpack[models.JobQuery]) -> AsyncPages[models.Job]:
        """List jobs, newest first; with ``scans`` also the scans that the service makes by itself."""
        return AsyncPages(self._send, operations.list_jobs(**options), page_size)

    async def job(self, job_id: int) -> models.Job:
        """Get one job."""
        return await self._send(operations.get_job(job_id))

    def job_tasks(self, job_id: int, *, page_size: int = 500) -> AsyncPages[models.JobTask]:
        """List the tasks of a job."""
        return AsyncPages(self._send, operations.list_job_tasks(job_id), page_size)

    async def job_throughput(self, job_id: int) -> models.JobThroughput:
        """Get the rate of a job, and the seconds left."""
        return await self._send(operations.get_job_throughput(job_id))

    async def job_log(self, job_id: int, *, lines: int = 100) -> list[models.JobLogLine]:
        """Get the last events of a job as sentences, in their order; 500 at most."""
        return (await self._send(operations.get_job_log(job_id).page(lines))).items

    async def cancel(self, job_id: int) -> models.Job:
        """Cancel a job."""
        return await self._send(operations.cancel_job(job_id))

    async def retry(self, job_id: int) -> models.Job:
        """Restart a job that has failed or was cancelled."""
        return await self._send(operations.retry_job(job_id))

    async def wait(
        self,
        job: models.Job | int,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[models.Job], None] | None = None,
    ) -> models.Job:
        """Wait until a job has succeeded.

        Raises JobFailedError, JobCancelledError, and WaitTimeoutError if it has not ended in time (it is not
        stopped).
        """
        job_id = job if isinstance(job, int) else job.id
        begun, pause = time.monotonic(), 0.0
        while True:
            found = await self.job(job_id)
            if on_progress is not None:
                on_progress(found)
            if found.is_final:
                return succeeded(found)
            pause = next_pause(pause)
            if timeout_seconds is not None and time.monotonic() - begun + pause > timeout_seconds:
                raise wait_timeout(found, timeout_seconds)
            await anyio.sleep(pause)

    def watch(self, job_id: int, *, after_id: int | None = None) -> AsyncIterator[JobEvent]:
        """Iterate over the events of a job as they happen, from its beginning (or after the event
        ``after_id``) to its end. A connection that breaks is made again, and no event is missed."""
        return self._watch(operations.watch_job(job_id), EventStream(after_id))

    def watch_jobs(self, *, after_id: int | None = None, scans: bool = False) -> AsyncIterator[JobEvent]:
        """Iterate over the events of all jobs from now on (or after the event ``after_id``), without end;
        with ``scans`` also of those that the service makes by itself."""
        return self._watch(operations.watch_jobs(scans=scans), EventStream(after_id))

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
        """Send a request for which there is no method, such as ``request("GET", "/audit")`` or one of a
        feature of another package, and get the JSON of the answer."""
        return await self._send(json_call(method, path, params, body, etag))
