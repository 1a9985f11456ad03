# Generated from asynchronous/client.py by `make client`.
"""`Client`: the service from a script, a notebook or a pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from dcp.server.client.generated import models
from dcp.server.client.requests import (
    Call,
    PagedCall,
    Params,
    array_of,
    given,
    joined,
    json_call,
    many,
    next_pause,
    nothing,
    one,
    query,
    segment,
    succeeded,
    wait_timeout,
    with_cursor,
)
from dcp.server.client.streams import EventStream, JobEvent, OnBytes
from dcp.server.client.synchronous.connection import Pages
from dcp.server.client.synchronous.methods import Methods

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")

_PAGE_SIZE: Final = 500


def _tensor(checkpoint_id: int, what: str, parse: Callable[[Any], T], params: Params) -> Call[T]:
    """Return the request of ``what`` of one tensor."""
    return Call("GET", f"/checkpoints/{checkpoint_id}/tensors/{what}", parse, params)


class Client(Methods):
    """The service at ``url``; a context manager::

        with Client("https://catalog:8470", key="dcp_...") as client:
            for checkpoint in client.checkpoints(run="llama/7", sort="metric:loss"):
                print(checkpoint.step, checkpoint.metrics)

    ``key`` is by default the environment's ``DCP_CATALOG_KEY``. ``timeout_seconds`` bounds each wait for the
    network; what fails in passing is tried again, ``retries`` times. ``verify`` and ``transport`` are
    httpx's. All errors are `dcp.server.client.ClientError`.

    Options of methods, with their meanings and defaults, are those of the API. Changes with an ``etag`` are
    made only if the object is still in that version. Requests that return a secret are not repeated once they
    were sent, because the answer is given only once.
    """

    # -- the catalog -----------------------------------------------------------------------------------------

    def checkpoint_facets(
        self, *, values: int = 20, **options: Unpack[models.CheckpointQuery]
    ) -> models.CheckpointFacets:
        """Count the checkpoints that `checkpoints` would list with each value of its filters."""
        filters: dict[str, Any] = {name: value for name, value in options.items() if name != "sort"}
        params = query(values=values, **filters)
        return self._call("GET", "/checkpoints/facets", one(models.CheckpointFacets), params)

    def search(self, text: str, *, kind: str | Sequence[str] = (), limit: int = 10) -> list[models.SearchHit]:
        """Search the names of runs, checkpoints, aliases, tags and tensors; the best first, and at most
        ``limit`` of each kind."""
        params = query(q=text, kind=kind, limit=limit)
        return self._call("GET", "/search", many(models.SearchHit), params)

    def delete_alias(self, run_id: int, name: str, *, etag: str) -> None:
        """Remove an alias; the checkpoint stays."""
        path = f"/runs/{run_id}/aliases/{segment(name)}"
        self._call("DELETE", path, nothing, etag=etag)

    # -- contents --------------------------------------------------------------------------------------------

    def tensor_tree(
        self, checkpoint_id: int, prefix: str = "", *, collapsed: bool = False, page_size: int = 500
    ) -> Pages[models.TreeNode]:
        """List one level of the tree that the dots in the names make; ``collapsed``: a name with a single one
        below it is one with that."""
        path = f"/checkpoints/{checkpoint_id}/tensors/tree"
        return self._pages(
            page_size, path, one(models.TreeNode), query(prefix=prefix, collapsed=collapsed or None)
        )

    def tensor(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> npt.NDArray[np.generic]:
        """Read one tensor, or a ``slice`` of it such as "0:2,:,-1"; as float32 where numpy lacks the type."""
        params = query(fqn=fqn, slice=slice, format="npy")
        return array_of(self._bytes(_tensor(checkpoint_id, "data", nothing, params)))

    def tensor_bytes(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> bytes:
        """Read one tensor, or a ``slice`` of it, as a safetensors file in the tensor's own type."""
        params = query(fqn=fqn, slice=slice, format="safetensors")
        return self._bytes(_tensor(checkpoint_id, "data", nothing, params))

    def tensor_grid(
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
        params = query(fqn=fqn, slice=slice, rows=rows, columns=columns, value=value)
        return self._send(_tensor(checkpoint_id, "grid", one(models.TensorGrid), params))

    def tensor_statistics(self, checkpoint_id: int, fqn: str) -> models.MeasuredTensor:
        """Get statistics of one tensor: computed by a job, or now if it is not large."""
        parse = one(models.MeasuredTensor)
        return self._send(_tensor(checkpoint_id, "statistics", parse, query(fqn=fqn)))

    def diff(self, checkpoint_id: int, before: int, **options: Unpack[models.DiffQuery]) -> models.Diff:
        """Get the differences from the checkpoint ``before``, by structure and checksums; no tensor is read.
        With ``basis="values"`` the differences of values that the job "diff" found last."""
        params = query(before=before, limit=_PAGE_SIZE, **options)
        call = Call("GET", f"/checkpoints/{checkpoint_id}/diff", with_cursor(models.Diff), params)
        return joined(self._parts(call))

    def will_it_load(
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
        path, parse = f"/checkpoints/{checkpoint_id}/will-it-load", one(models.LoadCheck)
        if tensors is None:
            return self._call("GET", path, parse, query(**options))
        named = [{"fqn": fqn, "shape": shape, "dtype": dtype} for fqn, (shape, dtype) in tensors.items()]
        through: dict[str, Any] = {name: options.get(name) for name in ("map", "inverse", "below")}
        body = given({"tensors": named, "objects": None if objects is None else list(objects)})
        return self._call("POST", path, parse, query(**through), body=body, only_reads=True)

    def statistics(self, checkpoint_id: int) -> models.Statistics:
        """Get the statistics of all values that were computed last. Raises NotFoundError before the first
        `compute_statistics`."""
        path, params = f"/checkpoints/{checkpoint_id}/statistics", query(limit=_PAGE_SIZE)
        return joined(self._parts(Call("GET", path, with_cursor(models.Statistics), params)))

    # -- downloads -------------------------------------------------------------------------------------------

    def download(
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
        call = Call("GET", f"/checkpoints/{checkpoint_id}/download", nothing, query(**options))
        return self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    def download_file(
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
        call = Call("GET", f"/checkpoints/{checkpoint_id}/files/{segment(name)}", nothing)
        return self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    # -- jobs ------------------------------------------------------------------------------------------------

    def submit(self, kind: str, params: Mapping[str, Any], *, priority: int = 0) -> models.Job:
        """Submit a job: "convert", "merge", "verify", "stats", "diff", "delete", "scan" or another kind, with
        the parameters of the kind. If an unfinished job does the same already, get that one."""
        body = {"kind": kind, "params": params, "priority": priority}
        return self._call("POST", "/jobs", one(models.Job), body=body)

    def merge(
        self, sources: Sequence[int], target_key: str, *, to: str, priority: int = 0, **params: Any
    ) -> models.Job:
        """Write the weighted sum of checkpoints by a job; ``params`` are ``weights``, ``formula`` or
        ``decay``, ``adapters`` (their numbers), ``target_root`` and the others of the kind "merge". Without
        ``sources`` it is of a run's newest steps: ``run_id``, and how many are ``last``."""
        params |= {"sources": sources, "target_key": target_key, "to": to}
        return self.submit("merge", params, priority=priority)

    def scan(self, root: str, *, below: str = "", accept_lost: int = 0) -> models.Job:
        """Scan a root, or a folder in it, by a job.

        ``accept_lost``: up to so many checkpoints that are not found are gone for good (`Root.lost`).
        """
        accepted = {"accept_lost": accept_lost} if accept_lost else {}  # unknown to an older service
        return self.submit("scan", {"root": root, "below": below, **accepted})

    def job_log(self, job_id: int, *, lines: int = 100) -> list[models.JobLogLine]:
        """Get the last events of a job as sentences, in their order; 500 at most."""
        call = PagedCall(f"/jobs/{job_id}/log", one(models.JobLogLine))
        return (self._send(call.page(lines))).items

    def wait(
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
            found = self.job(job_id)
            if on_progress is not None:
                on_progress(found)
            if found.is_final:
                return succeeded(found)
            pause = next_pause(pause)
            if timeout_seconds is not None and time.monotonic() - begun + pause > timeout_seconds:
                raise wait_timeout(found, timeout_seconds)
            time.sleep(pause)

    def watch(self, job_id: int, *, after_id: int | None = None) -> Iterator[JobEvent]:
        """Iterate over the events of a job as they happen, from its beginning (or after the event
        ``after_id``) to its end. A connection that breaks is made again, and no event is missed."""
        return self._watch(Call("GET", f"/jobs/{job_id}/events", nothing), EventStream(after_id))

    def watch_jobs(self, *, after_id: int | None = None, scans: bool = False) -> Iterator[JobEvent]:
        """Iterate over the events of all jobs from now on (or after the event ``after_id``), without end;
        with ``scans`` also of those that the service makes by itself."""
        return self._watch(Call("GET", "/jobs/events", nothing, query(scans=scans)), EventStream(after_id))

    # -- administration --------------------------------------------------------------------------------------

    def create_retention_policy(
        self, name: str, root: str, keep: Mapping[str, Any], **options: Unpack[models.PolicyOptions]
    ) -> models.RetentionPolicy:
        """Create a policy, which is applied at once: use `preview_retention` before. ``keep`` is what
        `dcp.Retention.to_dict` returns."""
        body = {"name": name, "root": root, "keep": keep, **given(options)}
        return self._call("POST", "/retention/policies", one(models.RetentionPolicy), body=body)

    def preview_retention(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str = "*", page_size: int = 50
    ) -> Pages[models.RetentionPreview]:
        """List the decisions of a policy with their reasons, by run; nothing is changed."""
        body = {"root": root, "keep": keep, "run_glob": run_glob}
        return self._pages(page_size, "/retention/preview", one(models.RetentionPreview), body=body)

    def preview_retention_policy(
        self, policy_id: int, *, page_size: int = 50
    ) -> Pages[models.RetentionPreview]:
        """List the decisions of an existing policy with their reasons, by run; nothing is changed."""
        path = f"/retention/policies/{policy_id}/preview"
        return self._pages(page_size, path, one(models.RetentionPreview))

    def run_retention_policy(self, policy_id: int, *, dry_run: bool = False) -> models.Job:
        """Apply a policy now, by a job; with ``dry_run`` its result says what would be deleted."""
        return self.submit("retention", {"policy_id": policy_id, "dry_run": dry_run})

    # -- anything else ---------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        etag: str | None = None,
    ) -> Any:
        """Send a request for which there is no method, such as one of a feature of another package, and get
        the JSON of the answer: ``request("GET", "/runs/1/nan-counts")``."""
        return self._send(json_call(method, path, params, body, etag))
