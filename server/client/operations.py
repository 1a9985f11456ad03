"""Operations of both clients with other names or arguments than in the REST API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from dcp.server.client.generated import models
from dcp.server.client.generated.methods import Methods
from dcp.server.client.requests import (
    Call,
    Listing,
    Operation,
    PagedCall,
    Params,
    array_of,
    given,
    many,
    nothing,
    one,
    query,
    segment,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


def _tensor(
    checkpoint_id: int, what: str, parse: Callable[[Any], T], params: Params, *, is_raw: bool = False
) -> Call[T]:
    """Return the request for ``what`` of one tensor."""
    path = f"/checkpoints/{checkpoint_id}/tensors/{what}"
    return Call("GET", path, parse, params, is_raw=is_raw)


def _job(kind: str, params: Mapping[str, Any], priority: int = 0) -> Call[models.Job]:
    body = {"kind": kind, "params": params, "priority": priority}
    return Call("POST", "/jobs", one(models.Job), body=body)


class Operations(Methods):
    """Methods of `Client` and `AsyncClient` that send one request each."""

    @Operation
    def checkpoint_facets(
        self, *, values: int = 20, **options: Unpack[models.CheckpointQuery]
    ) -> Call[models.CheckpointFacets]:
        """Count the checkpoints that `checkpoints` would list for each value of its filters."""
        filters: dict[str, Any] = {name: value for name, value in options.items() if name != "sort"}
        params = query(values=values, **filters)
        return Call("GET", "/checkpoints/facets", one(models.CheckpointFacets), params)

    @Operation
    def search(
        self, text: str, *, kind: str | Sequence[str] = (), limit: int = 10
    ) -> Call[list[models.SearchHit]]:
        """Search runs, checkpoints, aliases, tags and tensors by name, best first, up to ``limit`` of each
        kind."""
        params = query(q=text, kind=kind, limit=limit)
        return Call("GET", "/search", many(models.SearchHit), params)

    @Operation
    def delete_alias(self, run_id: int, name: str, *, etag: str) -> Call[None]:
        """Remove an alias; the checkpoint stays."""
        path = f"/runs/{run_id}/aliases/{segment(name)}"
        return Call("DELETE", path, nothing, etag=etag)

    @Listing
    def tensor_tree(
        self, checkpoint_id: int, prefix: str = "", *, collapsed: bool = False, page_size: int = 500
    ) -> PagedCall[models.TreeNode]:
        """List one level of the tree of dotted names. ``collapsed`` joins a name with its single child."""
        path = f"/checkpoints/{checkpoint_id}/tensors/tree"
        return PagedCall(
            page_size, path, one(models.TreeNode), query(prefix=prefix, collapsed=collapsed or None)
        )

    @Operation
    def tensor(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> Call[npt.NDArray[np.generic]]:
        """Read one tensor, or a ``slice`` such as "0:2,:,-1"; as float32 if NumPy lacks the dtype."""
        params = query(fqn=fqn, slice=slice, format="npy")
        return _tensor(checkpoint_id, "data", array_of, params, is_raw=True)

    @Operation
    def tensor_bytes(self, checkpoint_id: int, fqn: str, slice: str | None = None) -> Call[bytes]:
        """Read one tensor, or a ``slice``, as a safetensors file in the original dtype."""
        params = query(fqn=fqn, slice=slice, format="safetensors")
        return _tensor(checkpoint_id, "data", bytes, params, is_raw=True)

    @Operation
    def tensor_grid(
        self,
        checkpoint_id: int,
        fqn: str,
        slice: str | None = None,
        *,
        rows: int = 128,
        columns: int = 128,
        value: str | Sequence[str] = (),
    ) -> Call[models.TensorGrid]:
        """Get a two-dimensional tensor or slice as at most ``rows`` by ``columns`` cells.

        Each cell has "mean", "min", "max", "abs_max" and "nonfinite", or the values named in ``value``.
        """
        params = query(fqn=fqn, slice=slice, rows=rows, columns=columns, value=value)
        return _tensor(checkpoint_id, "grid", one(models.TensorGrid), params)

    @Operation
    def tensor_statistics(self, checkpoint_id: int, fqn: str) -> Call[models.MeasuredTensor]:
        """Get statistics of one tensor: from a job, or computed now for small tensors."""
        return _tensor(checkpoint_id, "statistics", one(models.MeasuredTensor), query(fqn=fqn))

    @Operation
    def will_it_load(
        self,
        checkpoint_id: int,
        *,
        tensors: Mapping[str, tuple[Sequence[int] | None, str | None]] | None = None,
        objects: Iterable[str] | None = None,
        **options: Unpack[models.LoadOptions],
    ) -> Call[models.LoadCheck]:
        """Check by names, shapes and dtypes if a checkpoint fills a state, and suggest a ``rename=``.

        Args:
            state_of: A checkpoint with the expected state.
            tensors: Expected shapes and dtypes by name; None is not compared.
            objects: Expected names of other values.
            map: A ready weight map to load through, as in `dcp.weight_map`.

        The expected state may also be the model that a job "shapes" made of a config.json.
        """
        path, parse = f"/checkpoints/{checkpoint_id}/will-it-load", one(models.LoadCheck)
        if tensors is None:
            return Call("GET", path, parse, query(**options))
        named = [{"fqn": fqn, "shape": shape, "dtype": dtype} for fqn, (shape, dtype) in tensors.items()]
        through: dict[str, Any] = {name: options.get(name) for name in ("map", "inverse", "below")}
        body = given({"tensors": named, "objects": None if objects is None else list(objects)})
        return Call("POST", path, parse, query(**through), body=body, only_reads=True)

    @Operation
    def submit(self, kind: str, params: Mapping[str, Any], *, priority: int = 0) -> Call[models.Job]:
        """Submit a job of a kind such as "convert", "merge", "verify", "stats", "diff", "delete" or "scan".

        Returns the unfinished job with the same work, if any.
        """
        return _job(kind, params, priority)

    @Operation
    def merge(
        self, /, sources: Sequence[int], target_key: str, *, to: str, priority: int = 0, **params: Any
    ) -> Call[models.Job]:
        """Write the weighted sum of checkpoints with a job.

        ``params`` are parameters of the kind "merge", such as ``weights``, ``formula`` or ``decay``,
        ``adapters`` and ``target_root``. Instead of ``sources``, ``run_id`` and ``last`` select the newest
        steps of a run.
        """
        params |= {"sources": sources, "target_key": target_key, "to": to}
        return _job("merge", params, priority)

    @Operation
    def scan(self, root: str, *, below: str = "", accept_lost: int = 0) -> Call[models.Job]:
        """Scan a root, or a folder in it, with a job.

        ``accept_lost``: maximum number of missing checkpoints to mark as vanished (`Root.lost`).
        """
        accepted = {"accept_lost": accept_lost} if accept_lost else {}  # unknown to an older service
        return _job("scan", {"root": root, "below": below, **accepted})

    @Operation
    def job_log(self, job_id: int, *, lines: int = 100) -> Call[list[models.JobLogLine]]:
        """Get the last events of a job as sentences, in order; at most 500."""
        return Call("GET", f"/jobs/{job_id}/log", many(models.JobLogLine), query(limit=lines))

    @Operation
    def create_retention_policy(
        self, name: str, root: str, keep: Mapping[str, Any], **options: Unpack[models.PolicyOptions]
    ) -> Call[models.RetentionPolicy]:
        """Create a policy, which takes effect at once: use `preview_retention` first.

        ``keep`` is the result of `dcp.Retention.to_dict`.
        """
        body = {"name": name, "root": root, "keep": keep, **given(options)}
        return Call("POST", "/retention/policies", one(models.RetentionPolicy), body=body)

    @Listing
    def preview_retention(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str = "*", page_size: int = 50
    ) -> PagedCall[models.RetentionPreview]:
        """List the decisions of a policy with reasons, by run, without changes."""
        body = {"root": root, "keep": keep, "run_glob": run_glob}
        return PagedCall(page_size, "/retention/preview", one(models.RetentionPreview), body=body)

    @Listing
    def preview_retention_policy(
        self, policy_id: int, *, page_size: int = 50
    ) -> PagedCall[models.RetentionPreview]:
        """List the decisions of an existing policy with reasons, by run, without changes."""
        path = f"/retention/policies/{policy_id}/preview"
        return PagedCall(page_size, path, one(models.RetentionPreview))

    @Operation
    def run_retention_policy(self, policy_id: int, *, dry_run: bool = False) -> Call[models.Job]:
        """Apply a policy with a job; with ``dry_run`` the job only reports deletions."""
        return _job("retention", {"policy_id": policy_id, "dry_run": dry_run})

    @Operation
    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        etag: str | None = None,
    ) -> Call[Any]:
        """Send any request, such as an operation of a plug-in, and return the JSON of the answer.

        Example: ``request("GET", "/runs/1/nan-counts")``.
        """
        return Call(method, path, lambda document: document, query(**params or {}), body, etag)
