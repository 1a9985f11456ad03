# Generated from the OpenAPI document by `make client`.
"""Requests of operations that `AsyncClient` wraps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from dcp.server.client.calls import (
    Call,
    PagedCall,
    given,
    if_match,
    many,
    nothing,
    one,
    query,
    segment,
    with_cursor,
)
from dcp.server.client.generated import models


def get_checkpoint_facets(**options: Unpack[models.FacetQuery]) -> Call[models.CheckpointFacets]:
    """GET /checkpoints/facets"""
    return Call("GET", "/checkpoints/facets", one(models.CheckpointFacets), query(**options))


def diff_checkpoints(
    checkpoint_id: int, before: int, *, limit: int | None = None, **options: Unpack[models.DiffQuery]
) -> Call[tuple[models.Diff, str | None]]:
    """GET /checkpoints/{checkpoint_id}/diff"""
    return Call(
        "GET",
        f"/checkpoints/{checkpoint_id}/diff",
        with_cursor(models.Diff),
        query(before=before, limit=limit, **options),
    )


def download_checkpoint(checkpoint_id: int, **options: Unpack[models.DownloadQuery]) -> Call[None]:
    """GET /checkpoints/{checkpoint_id}/download"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/download", nothing, query(**options))


def download_file(checkpoint_id: int, name: str, *, redirect: bool | None = None) -> Call[None]:
    """GET /checkpoints/{checkpoint_id}/files/{name}"""
    return Call(
        "GET", f"/checkpoints/{checkpoint_id}/files/{segment(name)}", nothing, query(redirect=redirect)
    )


def get_statistics(
    checkpoint_id: int, *, limit: int | None = None
) -> Call[tuple[models.Statistics, str | None]]:
    """GET /checkpoints/{checkpoint_id}/statistics"""
    return Call(
        "GET", f"/checkpoints/{checkpoint_id}/statistics", with_cursor(models.Statistics), query(limit=limit)
    )


def tensor_data(
    checkpoint_id: int, *, slice: str | None = None, format: str | None = None, fqn: str | None = None
) -> Call[None]:
    """GET /checkpoints/{checkpoint_id}/tensors/data"""
    return Call(
        "GET",
        f"/checkpoints/{checkpoint_id}/tensors/data",
        nothing,
        query(slice=slice, format=format, fqn=fqn),
    )


def get_tensor_grid(
    checkpoint_id: int,
    *,
    slice: str | None = None,
    rows: int | None = None,
    columns: int | None = None,
    value: str | Sequence[str] | None = None,
    fqn: str | None = None,
) -> Call[models.TensorGrid]:
    """GET /checkpoints/{checkpoint_id}/tensors/grid"""
    return Call(
        "GET",
        f"/checkpoints/{checkpoint_id}/tensors/grid",
        one(models.TensorGrid),
        query(slice=slice, rows=rows, columns=columns, value=value, fqn=fqn),
    )


def get_tensor_statistics(checkpoint_id: int, *, fqn: str | None = None) -> Call[models.TensorStatistics]:
    """GET /checkpoints/{checkpoint_id}/tensors/statistics"""
    return Call(
        "GET",
        f"/checkpoints/{checkpoint_id}/tensors/statistics",
        one(models.TensorStatistics),
        query(fqn=fqn),
    )


def tensor_tree(checkpoint_id: int, *, prefix: str | None = None) -> PagedCall[models.TreeNode]:
    """GET /checkpoints/{checkpoint_id}/tensors/tree"""
    return PagedCall(f"/checkpoints/{checkpoint_id}/tensors/tree", one(models.TreeNode), query(prefix=prefix))


def check_load_of(checkpoint_id: int, **options: Unpack[models.LoadOptions]) -> Call[models.LoadCheck]:
    """GET /checkpoints/{checkpoint_id}/will-it-load"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/will-it-load", one(models.LoadCheck), query(**options))


def check_load_of_state(
    checkpoint_id: int,
    tensors: Sequence[Mapping[str, Any]],
    *,
    map: str | None = None,
    inverse: bool | None = None,
    below: str | None = None,
    objects: str | Sequence[str] | None = None,
) -> Call[models.LoadCheck]:
    """POST /checkpoints/{checkpoint_id}/will-it-load"""
    return Call(
        "POST",
        f"/checkpoints/{checkpoint_id}/will-it-load",
        one(models.LoadCheck),
        query(map=map, inverse=inverse, below=below),
        body=given({"tensors": tensors, "objects": objects}),
        only_reads=True,
    )


def submit_job(body: Mapping[str, Any]) -> Call[models.Job]:
    """POST /jobs"""
    return Call("POST", "/jobs", one(models.Job), body=given(body))


def watch_jobs(*, scans: bool | None = None) -> Call[None]:
    """GET /jobs/events"""
    return Call("GET", "/jobs/events", nothing, query(scans=scans))


def watch_job(job_id: int) -> Call[None]:
    """GET /jobs/{job_id}/events"""
    return Call("GET", f"/jobs/{job_id}/events", nothing)


def get_job_log(job_id: int) -> PagedCall[models.JobLogLine]:
    """GET /jobs/{job_id}/log"""
    return PagedCall(f"/jobs/{job_id}/log", one(models.JobLogLine))


def create_retention_policy(
    root: str, keep: Mapping[str, Any], name: str, **options: Unpack[models.PolicyOptions]
) -> Call[models.RetentionPolicy]:
    """POST /retention/policies"""
    return Call(
        "POST",
        "/retention/policies",
        one(models.RetentionPolicy),
        body=given({"root": root, "keep": keep, "name": name, **options}),
    )


def preview_retention_policy(policy_id: int) -> PagedCall[models.RetentionPreview]:
    """GET /retention/policies/{policy_id}/preview"""
    return PagedCall(f"/retention/policies/{policy_id}/preview", one(models.RetentionPreview))


def preview_retention(
    root: str, keep: Mapping[str, Any], *, run_glob: str | None = None
) -> PagedCall[models.RetentionPreview]:
    """POST /retention/preview"""
    return PagedCall(
        "/retention/preview",
        one(models.RetentionPreview),
        body=given({"root": root, "run_glob": run_glob, "keep": keep}),
    )


def get_root(root: str) -> Call[models.Root]:
    """GET /roots/{root}"""
    return Call("GET", f"/roots/{segment(root)}", one(models.Root))


def delete_alias(run_id: int, name: str, *, etag: str | None = None) -> Call[None]:
    """DELETE /runs/{run_id}/aliases/{name}"""
    return Call("DELETE", f"/runs/{run_id}/aliases/{segment(name)}", nothing, headers=if_match(etag))


def search(
    q: str, *, kind: str | Sequence[str] | None = None, limit: int | None = None
) -> Call[list[models.SearchHit]]:
    """GET /search"""
    return Call("GET", "/search", many(models.SearchHit), query(q=q, kind=kind, limit=limit))


def list_webhook_deliveries(webhook_id: int, *, state: str | None = None) -> PagedCall[models.Delivery]:
    """GET /webhooks/{webhook_id}/deliveries"""
    return PagedCall(f"/webhooks/{webhook_id}/deliveries", one(models.Delivery), query(state=state))
