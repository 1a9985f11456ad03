# Generated from the OpenAPI document by `make client`.
"""The operations of the API: each function returns the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
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


def list_audit(
    *,
    actor: str | None = None,
    action: str | None = None,
    target: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> PagedCall[models.Audit]:
    """GET /audit"""
    return PagedCall(
        "/audit",
        one(models.Audit),
        query(actor=actor, action=action, target=target, since=since, until=until),
    )


def list_checkpoints(**options: Unpack[models.CheckpointQuery]) -> PagedCall[models.Checkpoint]:
    """GET /checkpoints"""
    return PagedCall("/checkpoints", one(models.Checkpoint), query(**options))


def register_checkpoint(body: Mapping[str, Any]) -> Call[models.Registered]:
    """POST /checkpoints"""
    return Call("POST", "/checkpoints", one(models.Registered), body=given(body))


def get_checkpoint_facets(**options: Unpack[models.FacetQuery]) -> Call[models.CheckpointFacets]:
    """GET /checkpoints/facets"""
    return Call("GET", "/checkpoints/facets", one(models.CheckpointFacets), query(**options))


def lookup_checkpoint(**options: Unpack[models.LookupQuery]) -> Call[models.CheckpointDetail]:
    """GET /checkpoints/lookup"""
    return Call("GET", "/checkpoints/lookup", one(models.CheckpointDetail), query(**options))


def delete_checkpoint(
    checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
) -> Call[models.CheckpointDetail]:
    """DELETE /checkpoints/{checkpoint_id}"""
    return Call(
        "DELETE",
        f"/checkpoints/{checkpoint_id}",
        one(models.CheckpointDetail),
        query(grace_seconds=grace_seconds),
        headers=if_match(etag),
    )


def get_checkpoint(checkpoint_id: int) -> Call[models.CheckpointDetail]:
    """GET /checkpoints/{checkpoint_id}"""
    return Call("GET", f"/checkpoints/{checkpoint_id}", one(models.CheckpointDetail))


def diff_checkpoints(
    checkpoint_id: int, *, before: int, limit: int | None = None, **options: Unpack[models.DiffQuery]
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


def list_files(checkpoint_id: int) -> Call[list[models.File]]:
    """GET /checkpoints/{checkpoint_id}/files"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/files", many(models.File))


def download_file(checkpoint_id: int, name: str, *, redirect: bool | None = None) -> Call[None]:
    """GET /checkpoints/{checkpoint_id}/files/{name}"""
    return Call(
        "GET", f"/checkpoints/{checkpoint_id}/files/{segment(name)}", nothing, query(redirect=redirect)
    )


def get_lineage(checkpoint_id: int) -> Call[models.Lineage]:
    """GET /checkpoints/{checkpoint_id}/lineage"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/lineage", one(models.Lineage))


def change_metrics(
    checkpoint_id: int, body: Mapping[str, Any], *, etag: str | None = None
) -> Call[models.CheckpointDetail]:
    """PATCH /checkpoints/{checkpoint_id}/metrics"""
    return Call(
        "PATCH",
        f"/checkpoints/{checkpoint_id}/metrics",
        one(models.CheckpointDetail),
        body=body,
        headers=if_match(etag),
    )


def get_phases(checkpoint_id: int, **options: Unpack[models.PhasesQuery]) -> Call[models.SavePhases]:
    """GET /checkpoints/{checkpoint_id}/phases"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/phases", one(models.SavePhases), query(**options))


def unpin_checkpoint(checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
    """DELETE /checkpoints/{checkpoint_id}/pin"""
    return Call(
        "DELETE", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), headers=if_match(etag)
    )


def pin_checkpoint(checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
    """PUT /checkpoints/{checkpoint_id}/pin"""
    return Call(
        "PUT", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), headers=if_match(etag)
    )


def restore_checkpoint(checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
    """POST /checkpoints/{checkpoint_id}/restore"""
    return Call(
        "POST", f"/checkpoints/{checkpoint_id}/restore", one(models.CheckpointDetail), headers=if_match(etag)
    )


def list_shards(checkpoint_id: int, *, glob: str | None = None) -> PagedCall[models.ShardedTensor]:
    """GET /checkpoints/{checkpoint_id}/shards"""
    return PagedCall(f"/checkpoints/{checkpoint_id}/shards", one(models.ShardedTensor), query(glob=glob))


def list_stored_chunks(
    checkpoint_id: int, **options: Unpack[models.StoredChunksQuery]
) -> PagedCall[models.StoredChunk]:
    """GET /checkpoints/{checkpoint_id}/shards/chunks"""
    return PagedCall(f"/checkpoints/{checkpoint_id}/shards/chunks", one(models.StoredChunk), query(**options))


def get_shard_map(checkpoint_id: int, **options: Unpack[models.ShardMapQuery]) -> Call[models.ShardMap]:
    """GET /checkpoints/{checkpoint_id}/shards/map"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/shards/map", one(models.ShardMap), query(**options))


def list_rank_shares(checkpoint_id: int) -> PagedCall[models.RankShare]:
    """GET /checkpoints/{checkpoint_id}/shards/ranks"""
    return PagedCall(f"/checkpoints/{checkpoint_id}/shards/ranks", one(models.RankShare))


def get_statistics(
    checkpoint_id: int, *, limit: int | None = None
) -> Call[tuple[models.Statistics, str | None]]:
    """GET /checkpoints/{checkpoint_id}/statistics"""
    return Call(
        "GET", f"/checkpoints/{checkpoint_id}/statistics", with_cursor(models.Statistics), query(limit=limit)
    )


def compute_statistics(checkpoint_id: int) -> Call[models.Job]:
    """POST /checkpoints/{checkpoint_id}/statistics"""
    return Call("POST", f"/checkpoints/{checkpoint_id}/statistics", one(models.Job))


def remove_tag(checkpoint_id: int, tag: str, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
    """DELETE /checkpoints/{checkpoint_id}/tags/{tag}"""
    return Call(
        "DELETE",
        f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}",
        one(models.CheckpointDetail),
        headers=if_match(etag),
    )


def add_tag(checkpoint_id: int, tag: str, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
    """PUT /checkpoints/{checkpoint_id}/tags/{tag}"""
    return Call(
        "PUT",
        f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}",
        one(models.CheckpointDetail),
        headers=if_match(etag),
    )


def list_tensors(checkpoint_id: int, **options: Unpack[models.TensorQuery]) -> PagedCall[models.Tensor]:
    """GET /checkpoints/{checkpoint_id}/tensors"""
    return PagedCall(f"/checkpoints/{checkpoint_id}/tensors", one(models.Tensor), query(**options))


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


def list_verifications(checkpoint_id: int, *, limit: int | None = None) -> Call[list[models.Verification]]:
    """GET /checkpoints/{checkpoint_id}/verifications"""
    return Call(
        "GET", f"/checkpoints/{checkpoint_id}/verifications", many(models.Verification), query(limit=limit)
    )


def verify_checkpoint(checkpoint_id: int) -> Call[models.Job]:
    """POST /checkpoints/{checkpoint_id}/verifications"""
    return Call("POST", f"/checkpoints/{checkpoint_id}/verifications", one(models.Job))


def check_load_of(checkpoint_id: int, **options: Unpack[models.LoadOptions]) -> Call[models.LoadCheck]:
    """GET /checkpoints/{checkpoint_id}/will-it-load"""
    return Call("GET", f"/checkpoints/{checkpoint_id}/will-it-load", one(models.LoadCheck), query(**options))


def check_load_of_state(
    checkpoint_id: int,
    body: Mapping[str, Any],
    *,
    map: str | None = None,
    inverse: bool | None = None,
    below: str | None = None,
) -> Call[models.LoadCheck]:
    """POST /checkpoints/{checkpoint_id}/will-it-load"""
    return Call(
        "POST",
        f"/checkpoints/{checkpoint_id}/will-it-load",
        one(models.LoadCheck),
        query(map=map, inverse=inverse, below=below),
        body=given(body),
        only_reads=True,
    )


def list_jobs(**options: Unpack[models.JobQuery]) -> PagedCall[models.Job]:
    """GET /jobs"""
    return PagedCall("/jobs", one(models.Job), query(**options))


def submit_job(body: Mapping[str, Any]) -> Call[models.Job]:
    """POST /jobs"""
    return Call("POST", "/jobs", one(models.Job), body=given(body))


def watch_jobs(*, scans: bool | None = None) -> Call[None]:
    """GET /jobs/events"""
    return Call("GET", "/jobs/events", nothing, query(scans=scans))


def get_job(job_id: int) -> Call[models.Job]:
    """GET /jobs/{job_id}"""
    return Call("GET", f"/jobs/{job_id}", one(models.Job))


def cancel_job(job_id: int) -> Call[models.Job]:
    """POST /jobs/{job_id}/cancel"""
    return Call("POST", f"/jobs/{job_id}/cancel", one(models.Job))


def watch_job(job_id: int) -> Call[None]:
    """GET /jobs/{job_id}/events"""
    return Call("GET", f"/jobs/{job_id}/events", nothing)


def get_job_log(job_id: int) -> PagedCall[models.JobLogLine]:
    """GET /jobs/{job_id}/log"""
    return PagedCall(f"/jobs/{job_id}/log", one(models.JobLogLine))


def retry_job(job_id: int) -> Call[models.Job]:
    """POST /jobs/{job_id}/retry"""
    return Call("POST", f"/jobs/{job_id}/retry", one(models.Job))


def list_job_tasks(job_id: int) -> PagedCall[models.JobTask]:
    """GET /jobs/{job_id}/tasks"""
    return PagedCall(f"/jobs/{job_id}/tasks", one(models.JobTask))


def get_job_throughput(job_id: int) -> Call[models.JobThroughput]:
    """GET /jobs/{job_id}/throughput"""
    return Call("GET", f"/jobs/{job_id}/throughput", one(models.JobThroughput))


def list_keys() -> Call[list[models.Key]]:
    """GET /keys"""
    return Call("GET", "/keys", many(models.Key))


def create_key(body: Mapping[str, Any]) -> Call[models.CreatedKey]:
    """POST /keys"""
    return Call("POST", "/keys", one(models.CreatedKey), body=given(body), has_secret=True)


def revoke_key(key_id: int) -> Call[models.Key]:
    """DELETE /keys/{key_id}"""
    return Call("DELETE", f"/keys/{key_id}", one(models.Key))


def get_key(key_id: int) -> Call[models.Key]:
    """GET /keys/{key_id}"""
    return Call("GET", f"/keys/{key_id}", one(models.Key))


def list_retention_policies() -> PagedCall[models.RetentionPolicy]:
    """GET /retention/policies"""
    return PagedCall("/retention/policies", one(models.RetentionPolicy))


def create_retention_policy(body: Mapping[str, Any]) -> Call[models.RetentionPolicy]:
    """POST /retention/policies"""
    return Call("POST", "/retention/policies", one(models.RetentionPolicy), body=given(body))


def delete_retention_policy(policy_id: int, *, etag: str | None = None) -> Call[None]:
    """DELETE /retention/policies/{policy_id}"""
    return Call("DELETE", f"/retention/policies/{policy_id}", nothing, headers=if_match(etag))


def get_retention_policy(policy_id: int) -> Call[models.RetentionPolicy]:
    """GET /retention/policies/{policy_id}"""
    return Call("GET", f"/retention/policies/{policy_id}", one(models.RetentionPolicy))


def change_retention_policy(
    policy_id: int, body: Mapping[str, Any], *, etag: str | None = None
) -> Call[models.RetentionPolicy]:
    """PATCH /retention/policies/{policy_id}"""
    return Call(
        "PATCH",
        f"/retention/policies/{policy_id}",
        one(models.RetentionPolicy),
        body=body,
        headers=if_match(etag),
    )


def preview_retention_policy(policy_id: int) -> PagedCall[models.RetentionPreview]:
    """GET /retention/policies/{policy_id}/preview"""
    return PagedCall(f"/retention/policies/{policy_id}/preview", one(models.RetentionPreview))


def preview_retention_policy_totals(policy_id: int) -> Call[models.RetentionTotals]:
    """GET /retention/policies/{policy_id}/preview/totals"""
    return Call("GET", f"/retention/policies/{policy_id}/preview/totals", one(models.RetentionTotals))


def run_retention_policy(policy_id: int) -> Call[models.Job]:
    """POST /retention/policies/{policy_id}/run"""
    return Call("POST", f"/retention/policies/{policy_id}/run", one(models.Job))


def preview_retention(body: Mapping[str, Any]) -> PagedCall[models.RetentionPreview]:
    """POST /retention/preview"""
    return PagedCall("/retention/preview", one(models.RetentionPreview), body=given(body))


def preview_retention_totals(body: Mapping[str, Any]) -> Call[models.RetentionTotals]:
    """POST /retention/preview/totals"""
    return Call(
        "POST", "/retention/preview/totals", one(models.RetentionTotals), body=given(body), only_reads=True
    )


def check_roots() -> Call[list[models.RootCheck]]:
    """GET /root-checks"""
    return Call("GET", "/root-checks", many(models.RootCheck))


def list_roots() -> Call[list[models.Root]]:
    """GET /roots"""
    return Call("GET", "/roots", many(models.Root))


def get_root(root: str) -> Call[models.Root]:
    """GET /roots/{root}"""
    return Call("GET", f"/roots/{segment(root)}", one(models.Root))


def list_rules() -> PagedCall[models.Rule]:
    """GET /rules"""
    return PagedCall("/rules", one(models.Rule))


def create_rule(body: Mapping[str, Any]) -> Call[models.Rule]:
    """POST /rules"""
    return Call("POST", "/rules", one(models.Rule), body=given(body))


def delete_rule(rule_id: int, *, etag: str | None = None) -> Call[None]:
    """DELETE /rules/{rule_id}"""
    return Call("DELETE", f"/rules/{rule_id}", nothing, headers=if_match(etag))


def get_rule(rule_id: int) -> Call[models.Rule]:
    """GET /rules/{rule_id}"""
    return Call("GET", f"/rules/{rule_id}", one(models.Rule))


def change_rule(rule_id: int, body: Mapping[str, Any], *, etag: str | None = None) -> Call[models.Rule]:
    """PATCH /rules/{rule_id}"""
    return Call("PATCH", f"/rules/{rule_id}", one(models.Rule), body=body, headers=if_match(etag))


def list_runs(**options: Unpack[models.RunQuery]) -> PagedCall[models.Run]:
    """GET /runs"""
    return PagedCall("/runs", one(models.Run), query(**options))


def get_run(run_id: int) -> Call[models.Run]:
    """GET /runs/{run_id}"""
    return Call("GET", f"/runs/{run_id}", one(models.Run))


def list_aliases(run_id: int) -> Call[list[models.Alias]]:
    """GET /runs/{run_id}/aliases"""
    return Call("GET", f"/runs/{run_id}/aliases", many(models.Alias))


def delete_alias(run_id: int, name: str, *, etag: str | None = None) -> Call[None]:
    """DELETE /runs/{run_id}/aliases/{name}"""
    return Call("DELETE", f"/runs/{run_id}/aliases/{segment(name)}", nothing, headers=if_match(etag))


def get_alias(run_id: int, name: str) -> Call[models.Alias]:
    """GET /runs/{run_id}/aliases/{name}"""
    return Call("GET", f"/runs/{run_id}/aliases/{segment(name)}", one(models.Alias))


def set_alias(
    run_id: int, name: str, body: Mapping[str, Any], *, etag: str | None = None
) -> Call[models.Alias]:
    """PUT /runs/{run_id}/aliases/{name}"""
    return Call(
        "PUT",
        f"/runs/{run_id}/aliases/{segment(name)}",
        one(models.Alias),
        body=given(body),
        headers=if_match(etag),
    )


def get_run_drift(run_id: int) -> Call[models.RunDrift]:
    """GET /runs/{run_id}/drift"""
    return Call("GET", f"/runs/{run_id}/drift", one(models.RunDrift))


def compute_run_drift(run_id: int) -> Call[models.Job]:
    """POST /runs/{run_id}/drift"""
    return Call("POST", f"/runs/{run_id}/drift", one(models.Job))


def get_run_series(run_id: int, *, metric: str, points: int | None = None) -> Call[models.Series]:
    """GET /runs/{run_id}/series"""
    return Call("GET", f"/runs/{run_id}/series", one(models.Series), query(metric=metric, points=points))


def get_run_tensor_bytes(
    run_id: int, *, only: str | Sequence[str] | None = None, below_step: int | None = None
) -> Call[models.TensorBytes]:
    """GET /runs/{run_id}/tensor-bytes"""
    return Call(
        "GET",
        f"/runs/{run_id}/tensor-bytes",
        one(models.TensorBytes),
        query(only=only, below_step=below_step),
    )


def get_run_timeline(run_id: int, **options: Unpack[models.TimelineQuery]) -> Call[models.RunTimeline]:
    """GET /runs/{run_id}/timeline"""
    return Call("GET", f"/runs/{run_id}/timeline", one(models.RunTimeline), query(**options))


def search(
    *, q: str, kind: str | Sequence[str] | None = None, limit: int | None = None
) -> Call[list[models.SearchHit]]:
    """GET /search"""
    return Call("GET", "/search", many(models.SearchHit), query(q=q, kind=kind, limit=limit))


def list_webhooks() -> PagedCall[models.Webhook]:
    """GET /webhooks"""
    return PagedCall("/webhooks", one(models.Webhook))


def create_webhook(body: Mapping[str, Any]) -> Call[models.WebhookSecret]:
    """POST /webhooks"""
    return Call("POST", "/webhooks", one(models.WebhookSecret), body=given(body), has_secret=True)


def delete_webhook(webhook_id: int, *, etag: str | None = None) -> Call[None]:
    """DELETE /webhooks/{webhook_id}"""
    return Call("DELETE", f"/webhooks/{webhook_id}", nothing, headers=if_match(etag))


def get_webhook(webhook_id: int) -> Call[models.Webhook]:
    """GET /webhooks/{webhook_id}"""
    return Call("GET", f"/webhooks/{webhook_id}", one(models.Webhook))


def change_webhook(
    webhook_id: int, body: Mapping[str, Any], *, etag: str | None = None
) -> Call[models.Webhook]:
    """PATCH /webhooks/{webhook_id}"""
    return Call("PATCH", f"/webhooks/{webhook_id}", one(models.Webhook), body=body, headers=if_match(etag))


def list_webhook_deliveries(webhook_id: int, *, state: str | None = None) -> PagedCall[models.Delivery]:
    """GET /webhooks/{webhook_id}/deliveries"""
    return PagedCall(f"/webhooks/{webhook_id}/deliveries", one(models.Delivery), query(state=state))


def redeliver_webhook_delivery(webhook_id: int, delivery_id: int) -> Call[models.Delivery]:
    """POST /webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"""
    return Call("POST", f"/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", one(models.Delivery))


def rotate_webhook_secret(
    webhook_id: int, body: Mapping[str, Any], *, etag: str | None = None
) -> Call[models.WebhookSecret]:
    """POST /webhooks/{webhook_id}/rotate-secret"""
    return Call(
        "POST",
        f"/webhooks/{webhook_id}/rotate-secret",
        one(models.WebhookSecret),
        body=given(body),
        headers=if_match(etag),
        has_secret=True,
    )


def test_webhook(webhook_id: int) -> Call[models.Delivery]:
    """POST /webhooks/{webhook_id}/test"""
    return Call("POST", f"/webhooks/{webhook_id}/test", one(models.Delivery))


def get_whoami() -> Call[models.Whoami]:
    """GET /whoami"""
    return Call("GET", "/whoami", one(models.Whoami))
