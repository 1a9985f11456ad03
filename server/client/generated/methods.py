# Generated from the OpenAPI document by `make client`.
"""Operations of the API as methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from dcp.server.client.generated import models
from dcp.server.client.requests import (
    Call,
    Listing,
    Operation,
    PagedCall,
    given,
    many,
    nothing,
    one,
    query,
    segment,
)


class Methods:
    """Methods of both clients that send one request each."""

    @Operation
    def own_account(self) -> Call[models.Account]:
        """Return the account of the caller; `/whoami` has the rights."""
        return Call("GET", "/account", one(models.Account))

    @Operation
    def own_keys(self) -> Call[list[models.Key]]:
        """List the keys of the caller's account, including revoked and expired keys."""
        return Call("GET", "/account/keys", many(models.Key))

    @Listing
    def accounts(
        self, *, page_size: int = 100, kind: str | None = None, q: str | None = None
    ) -> PagedCall[models.Account]:
        """List people and service accounts, by id."""
        return PagedCall(page_size, "/accounts", one(models.Account), query(kind=kind, q=q))

    @Operation
    def create_account(self, name: str, *, title: str | None = None) -> Call[models.Account]:
        """Create a service account."""
        return Call("POST", "/accounts", one(models.Account), body=given({"name": name, "title": title}))

    @Operation
    def account(self, account_id: int) -> Call[models.Account]:
        """Get a person or a service account."""
        return Call("GET", f"/accounts/{account_id}", one(models.Account))

    @Operation
    def change_account(
        self,
        account_id: int,
        *,
        is_disabled: bool | None = None,
        title: str | None = None,
        etag: str | None = None,
    ) -> Call[models.Account]:
        """Disable or enable an account. Sessions and keys of a disabled account do not work."""
        path = f"/accounts/{account_id}"
        return Call(
            "PATCH",
            path,
            one(models.Account),
            body=given({"is_disabled": is_disabled, "title": title}),
            etag=etag,
        )

    @Operation
    def account_keys(self, account_id: int) -> Call[list[models.Key]]:
        """List the keys of an account, including revoked and expired keys (in the admin's roots)."""
        return Call("GET", f"/accounts/{account_id}/keys", many(models.Key))

    @Operation
    def sign_out_account(self, account_id: int) -> Call[None]:
        """End all sessions of an account. Keys stay valid."""
        return Call("POST", f"/accounts/{account_id}/sign-out", nothing)

    @Listing
    def audit(
        self,
        *,
        page_size: int = 100,
        actor: str | None = None,
        action: str | None = None,
        target: str | None = None,
        root: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> PagedCall[models.AuditEntry]:
        """List audit entries, newest first. Filters compare for equality."""
        path = "/audit"
        return PagedCall(
            page_size,
            path,
            one(models.AuditEntry),
            query(actor=actor, action=action, target=target, root=root, since=since, until=until),
        )

    @Listing
    def checkpoints(
        self, *, page_size: int = 100, **options: Unpack[models.CheckpointQuery]
    ) -> PagedCall[models.Checkpoint]:
        """List checkpoints, newest first. Deleted and unreadable checkpoints need a `state` filter."""
        return PagedCall(page_size, "/checkpoints", one(models.Checkpoint), query(**options))

    @Operation
    def register(self, key: str, **options: Unpack[models.RegistrationOptions]) -> Call[models.Registered]:
        """Read a checkpoint now, before the next scan. Repetitions change nothing."""
        return Call("POST", "/checkpoints", one(models.Registered), body=given({"key": key, **options}))

    @Operation
    def lookup(self, **options: Unpack[models.LookupQuery]) -> Call[models.CheckpointDetail]:
        """Find a checkpoint by name. If several match, committed checkpoints come first, then newer
        checkpoints."""
        return Call("GET", "/checkpoints/lookup", one(models.CheckpointDetail), query(**options))

    @Operation
    def delete(
        self, checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
    ) -> Call[models.CheckpointDetail]:
        """Delete a checkpoint. The bytes stay until the end of the grace period, and the checkpoint can be
        restored."""
        path = f"/checkpoints/{checkpoint_id}"
        return Call(
            "DELETE", path, one(models.CheckpointDetail), query(grace_seconds=grace_seconds), etag=etag
        )

    @Operation
    def checkpoint(self, checkpoint_id: int) -> Call[models.CheckpointDetail]:
        """Return all facts about a checkpoint."""
        return Call("GET", f"/checkpoints/{checkpoint_id}", one(models.CheckpointDetail))

    @Operation
    def compute_digests(self, checkpoint_id: int) -> Call[models.Job]:
        """Submit a job that computes the digests of the tensors, to find checkpoints with equal tensors."""
        return Call("POST", f"/checkpoints/{checkpoint_id}/digests", one(models.Job))

    @Operation
    def files(self, checkpoint_id: int) -> Call[list[models.File]]:
        """Return the checkpoint's own files, as they are in the storage now."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/files", many(models.File))

    @Operation
    def handovers(self, checkpoint_id: int) -> Call[list[models.Handover]]:
        """List the handovers to all configured and earlier targets."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/handovers", many(models.Handover))

    @Operation
    def hand_over(self, checkpoint_id: int, target: str) -> Call[models.Job]:
        """Submit a job that registers the checkpoint at a target by URL. Repetitions create no second
        version."""
        path = f"/checkpoints/{checkpoint_id}/handovers"
        return Call("POST", path, one(models.Job), body=given({"target": target}))

    @Operation
    def lineage(self, checkpoint_id: int) -> Call[models.Lineage]:
        """Return all visible ancestors and descendants, nearest first."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/lineage", one(models.Lineage))

    @Operation
    def set_metrics(
        self, checkpoint_id: int, metrics: Mapping[str, Any], *, etag: str | None = None
    ) -> Call[models.CheckpointDetail]:
        """Set metrics, or remove them."""
        path = f"/checkpoints/{checkpoint_id}/metrics"
        return Call("PATCH", path, one(models.CheckpointDetail), body=given({"metrics": metrics}), etag=etag)

    @Listing
    def checkpoint_notes(self, checkpoint_id: int, *, page_size: int = 500) -> PagedCall[models.Note]:
        """List the notes on a checkpoint, newest first."""
        return PagedCall(page_size, f"/checkpoints/{checkpoint_id}/notes", one(models.Note))

    @Operation
    def create_checkpoint_note(self, checkpoint_id: int, text: str) -> Call[models.Note]:
        """Add a note to a checkpoint."""
        path = f"/checkpoints/{checkpoint_id}/notes"
        return Call("POST", path, one(models.Note), body=given({"text": text}))

    @Operation
    def phases(self, checkpoint_id: int, **options: Unpack[models.PhasesQuery]) -> Call[models.SavePhases]:
        """Return the recorded seconds of each phase of the save by rank."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/phases", one(models.SavePhases), query(**options))

    @Operation
    def unpin(self, checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
        """Unpin a checkpoint and allow its deletion."""
        return Call("DELETE", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), etag=etag)

    @Operation
    def pin(self, checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
        """Protect the checkpoint from deletion, also by retention."""
        return Call("PUT", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), etag=etag)

    @Operation
    def restore(self, checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
        """Restore a deleted checkpoint before its purge."""
        return Call("POST", f"/checkpoints/{checkpoint_id}/restore", one(models.CheckpointDetail), etag=etag)

    @Listing
    def shards(
        self, checkpoint_id: int, *, page_size: int = 500, glob: str | None = None
    ) -> PagedCall[models.ShardedTensor]:
        """List tensors with their boxes, and the rank and file of each box."""
        path = f"/checkpoints/{checkpoint_id}/shards"
        return PagedCall(page_size, path, one(models.ShardedTensor), query(glob=glob))

    @Listing
    def stored_chunks(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.StoredChunksQuery]
    ) -> PagedCall[models.StoredChunk]:
        """List chunks of the map by rank, file, and position, with numbers of copies."""
        path = f"/checkpoints/{checkpoint_id}/shards/chunks"
        return PagedCall(page_size, path, one(models.StoredChunk), query(**options))

    @Operation
    def shard_map(self, checkpoint_id: int, **options: Unpack[models.ShardMapQuery]) -> Call[models.ShardMap]:
        """Return the map of shards: rows of files by rank, bins of bytes, and the largest tensor in each
        bin."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/shards/map", one(models.ShardMap), query(**options))

    @Listing
    def rank_shares(self, checkpoint_id: int, *, page_size: int = 500) -> PagedCall[models.RankShare]:
        """List files, bytes, chunks, and tensors of each rank."""
        return PagedCall(page_size, f"/checkpoints/{checkpoint_id}/shards/ranks", one(models.RankShare))

    @Operation
    def request_stage(
        self, checkpoint_id: int, stage: str, *, reason: str | None = None, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Request the promotion of a checkpoint to a stage. A stage without approvals promotes
        immediately."""
        path = f"/checkpoints/{checkpoint_id}/stage-requests"
        return Call(
            "POST", path, one(models.StageRequest), body=given({"stage": stage, "reason": reason}), etag=etag
        )

    @Operation
    def compute_statistics(self, checkpoint_id: int) -> Call[models.Job]:
        """Compute the statistics of all tensors, by a job; they are kept with the checkpoint."""
        return Call("POST", f"/checkpoints/{checkpoint_id}/statistics", one(models.Job))

    @Operation
    def remove_tag(
        self, checkpoint_id: int, tag: str, *, etag: str | None = None
    ) -> Call[models.CheckpointDetail]:
        """Remove a tag. Removing a missing tag changes nothing."""
        path = f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}"
        return Call("DELETE", path, one(models.CheckpointDetail), etag=etag)

    @Operation
    def add_tag(
        self, checkpoint_id: int, tag: str, *, etag: str | None = None
    ) -> Call[models.CheckpointDetail]:
        """Add a tag. Adding an existing tag changes nothing."""
        path = f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}"
        return Call("PUT", path, one(models.CheckpointDetail), etag=etag)

    @Listing
    def tensors(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.TensorQuery]
    ) -> PagedCall[models.Tensor]:
        """List tensors and values by name from the catalog, without reading storage."""
        path = f"/checkpoints/{checkpoint_id}/tensors"
        return PagedCall(page_size, path, one(models.Tensor), query(**options))

    @Operation
    def verifications(
        self, checkpoint_id: int, *, limit: int | None = None
    ) -> Call[list[models.Verification]]:
        """Return the last verifications, newest first."""
        path = f"/checkpoints/{checkpoint_id}/verifications"
        return Call("GET", path, many(models.Verification), query(limit=limit))

    @Operation
    def verify(self, checkpoint_id: int) -> Call[models.Job]:
        """Read and compare every byte, by a job."""
        return Call("POST", f"/checkpoints/{checkpoint_id}/verifications", one(models.Job))

    @Listing
    def grants(
        self, *, page_size: int = 100, account_id: int | None = None, group: str | None = None
    ) -> PagedCall[models.Grant]:
        """List grants by id; admins of some roots see grants of these roots."""
        return PagedCall(page_size, "/grants", one(models.Grant), query(account_id=account_id, group=group))

    @Operation
    def create_grant(
        self, role: str, *, account_id: int | None = None, group: str | None = None, root: str | None = None
    ) -> Call[models.Grant]:
        """Grant a role. An account or group has at most one role per root, and one for all roots."""
        path = "/grants"
        return Call(
            "POST",
            path,
            one(models.Grant),
            body=given({"account_id": account_id, "group": group, "role": role, "root": root}),
        )

    @Operation
    def delete_grant(self, grant_id: int, *, etag: str | None = None) -> Call[None]:
        """Revoke a role immediately, also for keys and sessions."""
        return Call("DELETE", f"/grants/{grant_id}", nothing, etag=etag)

    @Operation
    def grant(self, grant_id: int) -> Call[models.Grant]:
        """Get a grant."""
        return Call("GET", f"/grants/{grant_id}", one(models.Grant))

    @Operation
    def change_grant(self, grant_id: int, role: str, *, etag: str | None = None) -> Call[models.Grant]:
        """Change the role."""
        return Call("PATCH", f"/grants/{grant_id}", one(models.Grant), body=given({"role": role}), etag=etag)

    @Listing
    def jobs(self, *, page_size: int = 100, **options: Unpack[models.JobQuery]) -> PagedCall[models.Job]:
        """List jobs, newest first. Several states or kinds match any of them."""
        return PagedCall(page_size, "/jobs", one(models.Job), query(**options))

    @Operation
    def job(self, job_id: int) -> Call[models.Job]:
        """Return a job with its progress, and the result after success."""
        return Call("GET", f"/jobs/{job_id}", one(models.Job))

    @Operation
    def cancel(self, job_id: int) -> Call[models.Job]:
        """Cancel the job and remove partial results. Repetitions are allowed; publication is not
        interrupted."""
        return Call("POST", f"/jobs/{job_id}/cancel", one(models.Job))

    @Operation
    def retry(self, job_id: int) -> Call[models.Job]:
        """Restart a failed or cancelled job."""
        return Call("POST", f"/jobs/{job_id}/retry", one(models.Job))

    @Listing
    def job_tasks(self, job_id: int, *, page_size: int = 500) -> PagedCall[models.JobTask]:
        """List the tasks of a planned job by number."""
        return PagedCall(page_size, f"/jobs/{job_id}/tasks", one(models.JobTask))

    @Operation
    def job_throughput(self, job_id: int) -> Call[models.JobThroughput]:
        """Return the speed of the tasks, and the estimated remaining time."""
        return Call("GET", f"/jobs/{job_id}/throughput", one(models.JobThroughput))

    @Operation
    def keys(self) -> Call[list[models.Key]]:
        """List all keys, including revoked and expired keys. Admins of some roots see keys of these roots."""
        return Call("GET", "/keys", many(models.Key))

    @Operation
    def create_key(
        self,
        name: str,
        *,
        scopes: str | Sequence[str] | None = None,
        roots: str | Sequence[str] | None = None,
        expires_in_seconds: float | None = None,
        account_id: int | None = None,
    ) -> Call[models.CreatedKey]:
        """Create a key. Only this answer shows the key, and an Idempotency-Key does not store it."""
        path = "/keys"
        return Call(
            "POST",
            path,
            one(models.CreatedKey),
            body=given(
                {
                    "name": name,
                    "scopes": scopes,
                    "roots": roots,
                    "expires_in_seconds": expires_in_seconds,
                    "account_id": account_id,
                }
            ),
            has_secret=True,
        )

    @Operation
    def revoke_key(self, key_id: int) -> Call[models.Key]:
        """Revoke a key immediately and permanently; the list keeps it. Repetitions are allowed."""
        return Call("DELETE", f"/keys/{key_id}", one(models.Key))

    @Operation
    def key(self, key_id: int) -> Call[models.Key]:
        """Return a key."""
        return Call("GET", f"/keys/{key_id}", one(models.Key))

    @Listing
    def notes(
        self,
        *,
        page_size: int = 100,
        contains: str | None = None,
        author: str | None = None,
        root: str | None = None,
    ) -> PagedCall[models.Note]:
        """List visible notes, newest first."""
        path = "/notes"
        return PagedCall(
            page_size, path, one(models.Note), query(contains=contains, author=author, root=root)
        )

    @Operation
    def delete_note(self, note_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a note with all versions. Requires the author or an admin."""
        return Call("DELETE", f"/notes/{note_id}", nothing, etag=etag)

    @Operation
    def note(self, note_id: int) -> Call[models.Note]:
        """Get a note."""
        return Call("GET", f"/notes/{note_id}", one(models.Note))

    @Operation
    def change_note(self, note_id: int, text: str, *, etag: str | None = None) -> Call[models.Note]:
        """Change the text. Only the author and admins may."""
        return Call("PATCH", f"/notes/{note_id}", one(models.Note), body=given({"text": text}), etag=etag)

    @Operation
    def note_versions(self, note_id: int) -> Call[list[models.NoteVersion]]:
        """List the texts of a note, newest first: the current text, and up to 100 earlier texts."""
        return Call("GET", f"/notes/{note_id}/versions", many(models.NoteVersion))

    @Listing
    def quotas(self, *, page_size: int = 100) -> PagedCall[models.Quota]:
        """List the stored quotas by id. Other subjects have the defaults of the settings."""
        return PagedCall(page_size, "/quotas", one(models.Quota))

    @Operation
    def create_quota(
        self, kind: str, subject: str, limits: Mapping[str, Any], *, note: str | None = None
    ) -> Call[models.Quota]:
        """Store limits for an account, a key or a root. They apply immediately, in all processes."""
        path = "/quotas"
        return Call(
            "POST",
            path,
            one(models.Quota),
            body=given({"kind": kind, "subject": subject, "limits": limits, "note": note}),
        )

    @Operation
    def quota_usage(
        self, *, kind: str | None = None, q: str | None = None, limit: int | None = None
    ) -> Call[list[models.SubjectUse]]:
        """List use and limits of accounts, keys, or roots: nearest to a limit first, then by bytes."""
        return Call("GET", "/quotas/usage", many(models.SubjectUse), query(kind=kind, q=q, limit=limit))

    @Operation
    def delete_quota(self, quota_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a quota: the defaults apply again."""
        return Call("DELETE", f"/quotas/{quota_id}", nothing, etag=etag)

    @Operation
    def quota(self, quota_id: int) -> Call[models.Quota]:
        """Get a quota."""
        return Call("GET", f"/quotas/{quota_id}", one(models.Quota))

    @Operation
    def change_quota(
        self,
        quota_id: int,
        *,
        limits: Mapping[str, Any] | None = None,
        note: str | None = None,
        etag: str | None = None,
    ) -> Call[models.Quota]:
        """Change the given fields; given limits replace all stored limits."""
        path = f"/quotas/{quota_id}"
        return Call("PATCH", path, one(models.Quota), body=given({"limits": limits, "note": note}), etag=etag)

    @Listing
    def retention_policies(self, *, page_size: int = 100) -> PagedCall[models.RetentionPolicy]:
        """List the policies of visible roots by id."""
        return PagedCall(page_size, "/retention/policies", one(models.RetentionPolicy))

    @Operation
    def delete_retention_policy(self, policy_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a policy. Deleted checkpoints stay deleted."""
        return Call("DELETE", f"/retention/policies/{policy_id}", nothing, etag=etag)

    @Operation
    def retention_policy(self, policy_id: int) -> Call[models.RetentionPolicy]:
        """Get a policy."""
        return Call("GET", f"/retention/policies/{policy_id}", one(models.RetentionPolicy))

    @Operation
    def change_retention_policy(
        self, policy_id: int, *, etag: str | None = None, **options: Unpack[models.PolicyChanges]
    ) -> Call[models.RetentionPolicy]:
        """Change the given fields; a running job of the policy stops."""
        path = f"/retention/policies/{policy_id}"
        return Call("PATCH", path, one(models.RetentionPolicy), body={**options}, etag=etag)

    @Operation
    def retention_policy_totals(self, policy_id: int) -> Call[models.RetentionTotals]:
        """Preview the totals of a stored policy: kept, deleted, and freed. Changes nothing."""
        return Call("GET", f"/retention/policies/{policy_id}/preview/totals", one(models.RetentionTotals))

    @Operation
    def retention_totals(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str | None = None
    ) -> Call[models.RetentionTotals]:
        """Preview the totals of a policy: kept, deleted, and freed. Changes nothing."""
        path = "/retention/preview/totals"
        return Call(
            "POST",
            path,
            one(models.RetentionTotals),
            body=given({"root": root, "run_glob": run_glob, "keep": keep}),
            only_reads=True,
        )

    @Operation
    def check_roots(self) -> Call[list[models.RootCheck]]:
        """Check the storage of each root, at most two seconds ago."""
        return Call("GET", "/root-checks", many(models.RootCheck))

    @Operation
    def roots(self) -> Call[list[models.Root]]:
        """List visible roots by name, with their last scans."""
        return Call("GET", "/roots", many(models.Root))

    @Operation
    def root(self, root: str) -> Call[models.Root]:
        """Return a root."""
        return Call("GET", f"/roots/{segment(root)}", one(models.Root))

    @Listing
    def rules(self, *, page_size: int = 100) -> PagedCall[models.Rule]:
        """List the rules by id; a key for some roots lists rules of these roots."""
        return PagedCall(page_size, "/rules", one(models.Rule))

    @Operation
    def create_rule(
        self, name: str, actions: Sequence[Mapping[str, Any]], **options: Unpack[models.RuleOptions]
    ) -> Call[models.Rule]:
        """Create a rule, for events from now on."""
        path = "/rules"
        return Call("POST", path, one(models.Rule), body=given({"name": name, "actions": actions, **options}))

    @Operation
    def delete_rule(self, rule_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a rule. Running jobs continue."""
        return Call("DELETE", f"/rules/{rule_id}", nothing, etag=etag)

    @Operation
    def rule(self, rule_id: int) -> Call[models.Rule]:
        """Get a rule."""
        return Call("GET", f"/rules/{rule_id}", one(models.Rule))

    @Operation
    def change_rule(
        self, rule_id: int, *, etag: str | None = None, **options: Unpack[models.RuleChanges]
    ) -> Call[models.Rule]:
        """Change the given fields, for events from now on."""
        return Call("PATCH", f"/rules/{rule_id}", one(models.Rule), body={**options}, etag=etag)

    @Listing
    def runs(self, *, page_size: int = 100, **options: Unpack[models.RunQuery]) -> PagedCall[models.Run]:
        """List runs, newest checkpoint first."""
        return PagedCall(page_size, "/runs", one(models.Run), query(**options))

    @Operation
    def compare_runs(
        self, run: Sequence[int], **options: Unpack[models.ComparisonQuery]
    ) -> Call[models.RunComparison]:
        """Compare up to ten runs: a metric over steps, best checkpoints, and metadata and facts of the
        newest checkpoints with differences."""
        return Call("GET", "/runs/compare", one(models.RunComparison), query(run=run, **options))

    @Listing
    def run_summaries(
        self, *, page_size: int = 100, **options: Unpack[models.RunListQuery]
    ) -> PagedCall[models.RunSummary]:
        """List runs with the last value, minimum, and maximum of a metric, sorted by any of these. A
        worker updates the values within two seconds of a change."""
        return PagedCall(page_size, "/runs/summaries", one(models.RunSummary), query(**options))

    @Operation
    def run(self, run_id: int) -> Call[models.Run]:
        """Return a run."""
        return Call("GET", f"/runs/{run_id}", one(models.Run))

    @Operation
    def run_activity(self, run_id: int) -> Call[models.RunActivity]:
        """Return the state of training from the checkpoints of a run: their interval, and the next
        expected checkpoint."""
        return Call("GET", f"/runs/{run_id}/activity", one(models.RunActivity))

    @Operation
    def aliases(self, run_id: int) -> Call[list[models.Alias]]:
        """List all aliases of a run by name."""
        return Call("GET", f"/runs/{run_id}/aliases", many(models.Alias))

    @Operation
    def alias(self, run_id: int, name: str) -> Call[models.Alias]:
        """Return the checkpoint of the alias."""
        return Call("GET", f"/runs/{run_id}/aliases/{segment(name)}", one(models.Alias))

    @Operation
    def set_alias(
        self,
        run_id: int,
        name: str,
        checkpoint_id: int,
        *,
        is_protected: bool | None = None,
        etag: str | None = None,
    ) -> Call[models.Alias]:
        """Point the alias at this checkpoint of the run. Without If-Match, the alias must be new."""
        path = f"/runs/{run_id}/aliases/{segment(name)}"
        return Call(
            "PUT",
            path,
            one(models.Alias),
            body=given({"checkpoint_id": checkpoint_id, "is_protected": is_protected}),
            etag=etag,
        )

    @Operation
    def run_drift(self, run_id: int) -> Call[models.RunDrift]:
        """Return the result of the last job. Not found before the first job, or after the job was deleted."""
        return Call("GET", f"/runs/{run_id}/drift", one(models.RunDrift))

    @Operation
    def compute_drift(self, run_id: int) -> Call[models.Job]:
        """Submit a job for up to 50 steps; `POST /jobs` with the kind `drift` selects steps."""
        return Call("POST", f"/runs/{run_id}/drift", one(models.Job))

    @Operation
    def watch_run(self, run_id: int) -> Call[None]:
        """Follow changes of a run as server-sent events: new checkpoints, labels, verdicts, deletions."""
        return Call("GET", f"/runs/{run_id}/events", nothing)

    @Listing
    def run_notes(
        self, run_id: int, *, page_size: int = 500, with_checkpoints: bool | None = None
    ) -> PagedCall[models.Note]:
        """List the notes on a run, newest first."""
        path = f"/runs/{run_id}/notes"
        return PagedCall(page_size, path, one(models.Note), query(with_checkpoints=with_checkpoints))

    @Operation
    def create_run_note(self, run_id: int, text: str) -> Call[models.Note]:
        """Add a note to a run."""
        return Call("POST", f"/runs/{run_id}/notes", one(models.Note), body=given({"text": text}))

    @Operation
    def run_series(self, run_id: int, metric: str, *, points: int | None = None) -> Call[models.Series]:
        """Return a metric over the steps of a run; of more checkpoints than points, each point is of
        several."""
        return Call("GET", f"/runs/{run_id}/series", one(models.Series), query(metric=metric, points=points))

    @Operation
    def run_stages(self, run_id: int) -> Call[list[models.StageHolder]]:
        """List the checkpoints of a run in stages, highest stage last."""
        return Call("GET", f"/runs/{run_id}/stages", many(models.StageHolder))

    @Listing
    def stage_history(self, run_id: int, *, page_size: int = 500) -> PagedCall[models.StageEntry]:
        """List requests, decisions, and changes of a run's stages, newest first."""
        return PagedCall(page_size, f"/runs/{run_id}/stages/history", one(models.StageEntry))

    @Operation
    def demote_checkpoint(
        self, run_id: int, stage: str, checkpoint_id: int, *, reason: str | None = None
    ) -> Call[None]:
        """Take a checkpoint out of a stage, and remove the alias. Requires the right to approve; for
        stages without approvals, the right to request."""
        path = f"/runs/{run_id}/stages/{segment(stage)}/demote"
        return Call("POST", path, nothing, body=given({"checkpoint_id": checkpoint_id, "reason": reason}))

    @Operation
    def run_tensor_bytes(
        self, run_id: int, *, only: str | Sequence[str] | None = None, below_step: int | None = None
    ) -> Call[models.TensorBytes]:
        """Return the bytes of selected tensors in the checkpoints of a run; default: optimizer states."""
        path = f"/runs/{run_id}/tensor-bytes"
        return Call("GET", path, one(models.TensorBytes), query(only=only, below_step=below_step))

    @Operation
    def run_timeline(self, run_id: int, **options: Unpack[models.TimelineQuery]) -> Call[models.RunTimeline]:
        """Return a run's checkpoints of all states over its steps, grouped into bins: bytes, seconds of
        saving, metrics, states, aliases."""
        return Call("GET", f"/runs/{run_id}/timeline", one(models.RunTimeline), query(**options))

    @Listing
    def stage_requests(
        self,
        *,
        page_size: int = 100,
        run_id: int | None = None,
        checkpoint_id: int | None = None,
        stage: str | None = None,
        state: str | None = None,
    ) -> PagedCall[models.StageRequest]:
        """List requests, newest first. The state `requested` means open."""
        path = "/stage-requests"
        return PagedCall(
            page_size,
            path,
            one(models.StageRequest),
            query(run_id=run_id, checkpoint_id=checkpoint_id, stage=stage, state=state),
        )

    @Operation
    def stage_request(self, request_id: int) -> Call[models.StageRequest]:
        """Get a request."""
        return Call("GET", f"/stage-requests/{request_id}", one(models.StageRequest))

    @Operation
    def approve_stage_request(
        self, request_id: int, *, reason: str | None = None, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Approve a request. The last required approval promotes the checkpoint. The answer is 409 if the
        content has changed since the request."""
        path = f"/stage-requests/{request_id}/approve"
        return Call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    @Operation
    def reject_stage_request(
        self, request_id: int, reason: str, *, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Reject a request. Requires the right to approve."""
        path = f"/stage-requests/{request_id}/reject"
        return Call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    @Operation
    def withdraw_stage_request(
        self, request_id: int, *, reason: str | None = None, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Withdraw an own request. Admins can withdraw any request."""
        path = f"/stage-requests/{request_id}/withdraw"
        return Call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    @Operation
    def stages(self) -> Call[list[models.Stage]]:
        """List the stages from lowest to highest, with rules and the caller's rights."""
        return Call("GET", "/stages", many(models.Stage))

    @Operation
    def usage(self) -> Call[models.Usage]:
        """Return use and limits of the caller's account and key, and of visible roots."""
        return Call("GET", "/usage", one(models.Usage))

    @Listing
    def webhooks(self, *, page_size: int = 100) -> PagedCall[models.Webhook]:
        """List the visible webhooks by id."""
        return PagedCall(page_size, "/webhooks", one(models.Webhook))

    @Operation
    def create_webhook(
        self, url: str, **options: Unpack[models.WebhookOptions]
    ) -> Call[models.WebhookSecret]:
        """Create a webhook. Only this answer shows its secret; an Idempotency-Key does not store it."""
        path = "/webhooks"
        return Call(
            "POST", path, one(models.WebhookSecret), body=given({"url": url, **options}), has_secret=True
        )

    @Operation
    def delete_webhook(self, webhook_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a webhook and its deliveries."""
        return Call("DELETE", f"/webhooks/{webhook_id}", nothing, etag=etag)

    @Operation
    def webhook(self, webhook_id: int) -> Call[models.Webhook]:
        """Get a webhook."""
        return Call("GET", f"/webhooks/{webhook_id}", one(models.Webhook))

    @Operation
    def change_webhook(
        self, webhook_id: int, *, etag: str | None = None, **options: Unpack[models.WebhookChanges]
    ) -> Call[models.Webhook]:
        """Change the given fields. Waiting deliveries of a disabled webhook are sent after it is enabled."""
        return Call("PATCH", f"/webhooks/{webhook_id}", one(models.Webhook), body={**options}, etag=etag)

    @Listing
    def deliveries(
        self, webhook_id: int, *, page_size: int = 500, state: str | None = None
    ) -> PagedCall[models.Delivery]:
        """List deliveries, newest event first. Old deliveries are deleted."""
        path = f"/webhooks/{webhook_id}/deliveries"
        return PagedCall(page_size, path, one(models.Delivery), query(state=state))

    @Operation
    def redeliver(self, webhook_id: int, delivery_id: int) -> Call[models.Delivery]:
        """Repeat a delivery from its first attempt."""
        path = f"/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"
        return Call("POST", path, one(models.Delivery))

    @Operation
    def rotate_webhook_secret(
        self,
        webhook_id: int,
        *,
        secret: str | None = None,
        overlap_seconds: float | None = None,
        etag: str | None = None,
    ) -> Call[models.WebhookSecret]:
        """Replace the secret. During the overlap, deliveries carry signatures of both secrets."""
        path = f"/webhooks/{webhook_id}/rotate-secret"
        return Call(
            "POST",
            path,
            one(models.WebhookSecret),
            body=given({"secret": secret, "overlap_seconds": overlap_seconds}),
            etag=etag,
            has_secret=True,
        )

    @Operation
    def test_webhook(self, webhook_id: int) -> Call[models.Delivery]:
        """Send an event of the type `webhook.test`; a worker sends within seconds."""
        return Call("POST", f"/webhooks/{webhook_id}/test", one(models.Delivery))

    @Operation
    def whoami(self) -> Call[models.Whoami]:
        """Return name, scopes and roots of the key. Without keys, every caller is `local` and has all
        rights."""
        return Call("GET", "/whoami", one(models.Whoami))
