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
        """Get the account of the caller; `/whoami` has its rights."""
        return Call("GET", "/account", one(models.Account))

    @Operation
    def own_keys(self) -> Call[list[models.Key]]:
        """List the keys of the caller's account, revoked and expired ones too."""
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
        """Disable or enable an account. One that is disabled has neither sessions nor keys that work."""
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
        """List the keys of an account, revoked and expired ones too (in the roots of the admin)."""
        return Call("GET", f"/accounts/{account_id}/keys", many(models.Key))

    @Operation
    def sign_out_account(self, account_id: int) -> Call[None]:
        """End all sessions of an account. Its keys stay."""
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
        """Entries, newest first; actor, action, target and root have to be equal."""
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
        """Checkpoints, the newest first; deleted and unreadable ones only if `state` asks for them."""
        return PagedCall(page_size, "/checkpoints", one(models.Checkpoint), query(**options))

    @Operation
    def register(self, key: str, **options: Unpack[models.RegistrationOptions]) -> Call[models.Registered]:
        """Look at a checkpoint now, instead of at the next scan. A repetition changes nothing."""
        return Call("POST", "/checkpoints", one(models.Registered), body=given({"key": key, **options}))

    @Operation
    def lookup(self, **options: Unpack[models.LookupQuery]) -> Call[models.CheckpointDetail]:
        """Return the checkpoint of this name. Of several, as in other roots and formats, a committed one,
        and the newest."""
        return Call("GET", "/checkpoints/lookup", one(models.CheckpointDetail), query(**options))

    @Operation
    def delete(
        self, checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
    ) -> Call[models.CheckpointDetail]:
        """Delete a checkpoint. Its bytes stay, and it can be restored, until its grace is over."""
        path = f"/checkpoints/{checkpoint_id}"
        return Call(
            "DELETE", path, one(models.CheckpointDetail), query(grace_seconds=grace_seconds), etag=etag
        )

    @Operation
    def checkpoint(self, checkpoint_id: int) -> Call[models.CheckpointDetail]:
        """All that is known of a checkpoint."""
        return Call("GET", f"/checkpoints/{checkpoint_id}", one(models.CheckpointDetail))

    @Operation
    def compute_digests(self, checkpoint_id: int) -> Call[models.Job]:
        """Compute the digests of its tensors, by a job, so that checkpoints with the same are found."""
        return Call("POST", f"/checkpoints/{checkpoint_id}/digests", one(models.Job))

    @Operation
    def files(self, checkpoint_id: int) -> Call[list[models.File]]:
        """Return the checkpoint's own files, as they are in the storage now."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/files", many(models.File))

    @Operation
    def handovers(self, checkpoint_id: int) -> Call[list[models.Handover]]:
        """List the handovers to all targets that are configured, and to earlier ones."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/handovers", many(models.Handover))

    @Operation
    def hand_over(self, checkpoint_id: int, target: str) -> Call[models.Job]:
        """Register the checkpoint at a target by its URL, by a job. Done again, it makes no second
        version."""
        path = f"/checkpoints/{checkpoint_id}/handovers"
        return Call("POST", path, one(models.Job), body=given({"target": target}))

    @Operation
    def lineage(self, checkpoint_id: int) -> Call[models.Lineage]:
        """All ancestors and descendants that the key may see, nearest first."""
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
        """Return the seconds of each phase of its save, by rank, as far as the save recorded them."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/phases", one(models.SavePhases), query(**options))

    @Operation
    def unpin(self, checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
        """Allow that it is deleted again."""
        return Call("DELETE", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), etag=etag)

    @Operation
    def pin(self, checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
        """Protect the checkpoint from deletion, also by retention."""
        return Call("PUT", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), etag=etag)

    @Operation
    def restore(self, checkpoint_id: int, *, etag: str | None = None) -> Call[models.CheckpointDetail]:
        """Restore a deleted checkpoint, unless its bytes are being purged already."""
        return Call("POST", f"/checkpoints/{checkpoint_id}/restore", one(models.CheckpointDetail), etag=etag)

    @Listing
    def shards(
        self, checkpoint_id: int, *, page_size: int = 500, glob: str | None = None
    ) -> PagedCall[models.ShardedTensor]:
        """Tensors with the boxes that they are cut into, and the rank and file of each."""
        path = f"/checkpoints/{checkpoint_id}/shards"
        return PagedCall(page_size, path, one(models.ShardedTensor), query(glob=glob))

    @Listing
    def stored_chunks(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.StoredChunksQuery]
    ) -> PagedCall[models.StoredChunk]:
        """Chunks of the map one by one, by rank, file and place, with their numbers of copies."""
        path = f"/checkpoints/{checkpoint_id}/shards/chunks"
        return PagedCall(page_size, path, one(models.StoredChunk), query(**options))

    @Operation
    def shard_map(self, checkpoint_id: int, **options: Unpack[models.ShardMapQuery]) -> Call[models.ShardMap]:
        """Return the map of shards: rows of files by rank, bins of bytes, and the largest tensor in each
        bin."""
        return Call("GET", f"/checkpoints/{checkpoint_id}/shards/map", one(models.ShardMap), query(**options))

    @Listing
    def rank_shares(self, checkpoint_id: int, *, page_size: int = 500) -> PagedCall[models.RankShare]:
        """Files, bytes, chunks and tensors of each rank."""
        return PagedCall(page_size, f"/checkpoints/{checkpoint_id}/shards/ranks", one(models.RankShare))

    @Operation
    def request_stage(
        self, checkpoint_id: int, stage: str, *, reason: str | None = None, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Request that a checkpoint is promoted to a stage. If that needs no approval, it is promoted at
        once."""
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
        """Remove a tag. A tag that the checkpoint does not have changes nothing."""
        path = f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}"
        return Call("DELETE", path, one(models.CheckpointDetail), etag=etag)

    @Operation
    def add_tag(
        self, checkpoint_id: int, tag: str, *, etag: str | None = None
    ) -> Call[models.CheckpointDetail]:
        """Add a tag. A tag that the checkpoint has already changes nothing."""
        path = f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}"
        return Call("PUT", path, one(models.CheckpointDetail), etag=etag)

    @Listing
    def tensors(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.TensorQuery]
    ) -> PagedCall[models.Tensor]:
        """Tensors and values by name, as they were when the checkpoint was found; nothing is read."""
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
        """List grants by id; those in its roots alone for an admin of some."""
        return PagedCall(page_size, "/grants", one(models.Grant), query(account_id=account_id, group=group))

    @Operation
    def create_grant(
        self, role: str, *, account_id: int | None = None, group: str | None = None, root: str | None = None
    ) -> Call[models.Grant]:
        """Grant a role; an account or group has one in each root, and one for all roots beside."""
        path = "/grants"
        return Call(
            "POST",
            path,
            one(models.Grant),
            body=given({"account_id": account_id, "group": group, "role": role, "root": root}),
        )

    @Operation
    def delete_grant(self, grant_id: int, *, etag: str | None = None) -> Call[None]:
        """Revoke a role: it ends at once, also for keys and sessions."""
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
        """Jobs, newest first. Of states and kinds, any of those that are given."""
        return PagedCall(page_size, "/jobs", one(models.Job), query(**options))

    @Operation
    def job(self, job_id: int) -> Call[models.Job]:
        """One job, with its progress, and its result once it has succeeded."""
        return Call("GET", f"/jobs/{job_id}", one(models.Job))

    @Operation
    def cancel(self, job_id: int) -> Call[models.Job]:
        """Stop the job, and remove what it left. A repetition is fine; publishing is not stopped."""
        return Call("POST", f"/jobs/{job_id}/cancel", one(models.Job))

    @Operation
    def retry(self, job_id: int) -> Call[models.Job]:
        """Begin a job anew that has failed or was cancelled."""
        return Call("POST", f"/jobs/{job_id}/retry", one(models.Job))

    @Listing
    def job_tasks(self, job_id: int, *, page_size: int = 500) -> PagedCall[models.JobTask]:
        """Return the tasks of the job by number, once it is planned."""
        return PagedCall(page_size, f"/jobs/{job_id}/tasks", one(models.JobTask))

    @Operation
    def job_throughput(self, job_id: int) -> Call[models.JobThroughput]:
        """Return the speed of its tasks, and an estimate of the time that is left."""
        return Call("GET", f"/jobs/{job_id}/throughput", one(models.JobThroughput))

    @Operation
    def keys(self) -> Call[list[models.Key]]:
        """All keys, revoked and expired ones too; for admins of some roots those of these roots alone."""
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
        """Create a key. The answer shows it for the only time, so that it is not kept for an Idempotency-
        Key."""
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
        """End a key at once and for ever; it stays in the list. Again is fine."""
        return Call("DELETE", f"/keys/{key_id}", one(models.Key))

    @Operation
    def key(self, key_id: int) -> Call[models.Key]:
        """One key."""
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
        """List all notes that the key may see, newest first."""
        path = "/notes"
        return PagedCall(
            page_size, path, one(models.Note), query(contains=contains, author=author, root=root)
        )

    @Operation
    def delete_note(self, note_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a note with all of its versions. Only the author and admins may."""
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
        """List the texts of a note, the newest first: the present one, and up to 100 before it."""
        return Call("GET", f"/notes/{note_id}/versions", many(models.NoteVersion))

    @Listing
    def quotas(self, *, page_size: int = 100) -> PagedCall[models.Quota]:
        """List the stored quotas, by id. Others have the defaults of the settings."""
        return PagedCall(page_size, "/quotas", one(models.Quota))

    @Operation
    def create_quota(
        self, kind: str, subject: str, limits: Mapping[str, Any], *, note: str | None = None
    ) -> Call[models.Quota]:
        """Store limits for an account, a key or a root. They hold at once, in all processes."""
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
        """List use and limits of accounts, keys or roots: those nearest to a limit first, then by bytes."""
        return Call("GET", "/quotas/usage", many(models.SubjectUse), query(kind=kind, q=q, limit=limit))

    @Operation
    def delete_quota(self, quota_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a quota: the defaults hold again."""
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
        """Change the given fields; limits that are given take the place of all that were stored."""
        path = f"/quotas/{quota_id}"
        return Call("PATCH", path, one(models.Quota), body=given({"limits": limits, "note": note}), etag=etag)

    @Listing
    def retention_policies(self, *, page_size: int = 100) -> PagedCall[models.RetentionPolicy]:
        """List the policies of the roots that the key may see, by id."""
        return PagedCall(page_size, "/retention/policies", one(models.RetentionPolicy))

    @Operation
    def delete_retention_policy(self, policy_id: int, *, etag: str | None = None) -> Call[None]:
        """Delete a policy. Checkpoints that it has deleted stay deleted."""
        return Call("DELETE", f"/retention/policies/{policy_id}", nothing, etag=etag)

    @Operation
    def retention_policy(self, policy_id: int) -> Call[models.RetentionPolicy]:
        """Get a policy."""
        return Call("GET", f"/retention/policies/{policy_id}", one(models.RetentionPolicy))

    @Operation
    def change_retention_policy(
        self, policy_id: int, *, etag: str | None = None, **options: Unpack[models.PolicyChanges]
    ) -> Call[models.RetentionPolicy]:
        """Change the given fields; a job of the policy that is running stops."""
        path = f"/retention/policies/{policy_id}"
        return Call("PATCH", path, one(models.RetentionPolicy), body={**options}, etag=etag)

    @Operation
    def retention_policy_totals(self, policy_id: int) -> Call[models.RetentionTotals]:
        """Add up what a policy would keep, delete and free; nothing is changed."""
        return Call("GET", f"/retention/policies/{policy_id}/preview/totals", one(models.RetentionTotals))

    @Operation
    def retention_totals(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str | None = None
    ) -> Call[models.RetentionTotals]:
        """Add up what a policy would keep, delete and free; nothing is changed."""
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
        """Return whether the storage of each root answers: looked at now, or within the last two seconds."""
        return Call("GET", "/root-checks", many(models.RootCheck))

    @Operation
    def roots(self) -> Call[list[models.Root]]:
        """All roots that the key may see, by name, with their last scans."""
        return Call("GET", "/roots", many(models.Root))

    @Operation
    def root(self, root: str) -> Call[models.Root]:
        """One root."""
        return Call("GET", f"/roots/{segment(root)}", one(models.Root))

    @Listing
    def rules(self, *, page_size: int = 100) -> PagedCall[models.Rule]:
        """List the rules by id; those of its roots alone for a key of some roots."""
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
        """Delete a rule. Its jobs continue."""
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
        """Runs, the one with the newest checkpoint first."""
        return PagedCall(page_size, "/runs", one(models.Run), query(**options))

    @Operation
    def compare_runs(
        self, run: Sequence[int], **options: Unpack[models.ComparisonQuery]
    ) -> Call[models.RunComparison]:
        """Up to ten runs side by side: a metric over their steps, the best checkpoints, and metadata and
        facts of the newest ones with what differs."""
        return Call("GET", "/runs/compare", one(models.RunComparison), query(run=run, **options))

    @Listing
    def run_summaries(
        self, *, page_size: int = 100, **options: Unpack[models.RunListQuery]
    ) -> PagedCall[models.RunSummary]:
        """Runs with a metric's last value, minimum and maximum, sorted by one of these. What has changed
        is summed up by a worker within a second or two."""
        return PagedCall(page_size, "/runs/summaries", one(models.RunSummary), query(**options))

    @Operation
    def run(self, run_id: int) -> Call[models.Run]:
        """One run."""
        return Call("GET", f"/runs/{run_id}", one(models.Run))

    @Operation
    def run_activity(self, run_id: int) -> Call[models.RunActivity]:
        """Tell from its checkpoints whether a run is training: their interval, and the next expected one."""
        return Call("GET", f"/runs/{run_id}/activity", one(models.RunActivity))

    @Operation
    def aliases(self, run_id: int) -> Call[list[models.Alias]]:
        """All aliases of a run, by name."""
        return Call("GET", f"/runs/{run_id}/aliases", many(models.Alias))

    @Operation
    def alias(self, run_id: int, name: str) -> Call[models.Alias]:
        """Return the checkpoint that the alias names."""
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
        """Let the alias name this checkpoint of the run. Without If-Match only if there is no such alias
        yet."""
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
        """Return the result of the last job; not found before the first one, and once that job is
        forgotten."""
        return Call("GET", f"/runs/{run_id}/drift", one(models.RunDrift))

    @Operation
    def compute_drift(self, run_id: int) -> Call[models.Job]:
        """Compute it for up to 50 steps, by a job; `POST /jobs` with the kind `drift` chooses the steps."""
        return Call("POST", f"/runs/{run_id}/drift", one(models.Job))

    @Operation
    def watch_run(self, run_id: int) -> Call[None]:
        """Changes of a run, as server-sent events: new checkpoints, labels, verdicts, deletions."""
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
        """List the checkpoints of a run that are in stages, those in the highest last."""
        return Call("GET", f"/runs/{run_id}/stages", many(models.StageHolder))

    @Listing
    def stage_history(self, run_id: int, *, page_size: int = 500) -> PagedCall[models.StageEntry]:
        """List all that was requested, decided and changed about the stages of a run, newest first."""
        return PagedCall(page_size, f"/runs/{run_id}/stages/history", one(models.StageEntry))

    @Operation
    def demote_checkpoint(
        self, run_id: int, stage: str, checkpoint_id: int, *, reason: str | None = None
    ) -> Call[None]:
        """Take a checkpoint out of a stage; the alias of that name is removed. Who may approve may;
        without approvals, who may request."""
        path = f"/runs/{run_id}/stages/{segment(stage)}/demote"
        return Call("POST", path, nothing, body=given({"checkpoint_id": checkpoint_id, "reason": reason}))

    @Operation
    def run_tensor_bytes(
        self, run_id: int, *, only: str | Sequence[str] | None = None, below_step: int | None = None
    ) -> Call[models.TensorBytes]:
        """Return the bytes of tensors in the checkpoints of a run, by their names; of optimizers by
        default."""
        path = f"/runs/{run_id}/tensor-bytes"
        return Call("GET", path, one(models.TensorBytes), query(only=only, below_step=below_step))

    @Operation
    def run_timeline(self, run_id: int, **options: Unpack[models.TimelineQuery]) -> Call[models.RunTimeline]:
        """Return the checkpoints of a run over its steps, of all states, neighbours summed up: bytes,
        seconds of saving, metrics, states, aliases."""
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
        """List requests, newest first. Those with the state `requested` are open."""
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
        """Approve a request. The last approval that it needs promotes the checkpoint as it was requested:
        if its content has changed since, the answer is 409."""
        path = f"/stage-requests/{request_id}/approve"
        return Call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    @Operation
    def reject_stage_request(
        self, request_id: int, reason: str, *, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Reject a request. Who may approve it may."""
        path = f"/stage-requests/{request_id}/reject"
        return Call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    @Operation
    def withdraw_stage_request(
        self, request_id: int, *, reason: str | None = None, etag: str | None = None
    ) -> Call[models.StageRequest]:
        """Withdraw one's own request. Admins may withdraw any."""
        path = f"/stage-requests/{request_id}/withdraw"
        return Call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    @Operation
    def stages(self) -> Call[list[models.Stage]]:
        """List the stages from the lowest to the highest, with their rules and what the caller may do."""
        return Call("GET", "/stages", many(models.Stage))

    @Operation
    def usage(self) -> Call[models.Usage]:
        """Return use and limits of the caller's account and key, and of the roots that it may see."""
        return Call("GET", "/usage", one(models.Usage))

    @Listing
    def webhooks(self, *, page_size: int = 100) -> PagedCall[models.Webhook]:
        """List the webhooks that the key may see, by id."""
        return PagedCall(page_size, "/webhooks", one(models.Webhook))

    @Operation
    def create_webhook(
        self, url: str, **options: Unpack[models.WebhookOptions]
    ) -> Call[models.WebhookSecret]:
        """Create a webhook. The answer shows its secret, once: no Idempotency-Key keeps it."""
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
        """Change the given fields. Deliveries that wait for a disabled webhook are sent once it is
        enabled."""
        return Call("PATCH", f"/webhooks/{webhook_id}", one(models.Webhook), body={**options}, etag=etag)

    @Listing
    def deliveries(
        self, webhook_id: int, *, page_size: int = 500, state: str | None = None
    ) -> PagedCall[models.Delivery]:
        """List deliveries, newest event first. Old ones are forgotten."""
        path = f"/webhooks/{webhook_id}/deliveries"
        return PagedCall(page_size, path, one(models.Delivery), query(state=state))

    @Operation
    def redeliver(self, webhook_id: int, delivery_id: int) -> Call[models.Delivery]:
        """Make a delivery again, from its first attempt on."""
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
        """Give it a new secret. Until the overlap is over, deliveries carry signatures of both."""
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
        """Send it an event of the type `webhook.test`; a worker does so within seconds."""
        return Call("POST", f"/webhooks/{webhook_id}/test", one(models.Delivery))

    @Operation
    def whoami(self) -> Call[models.Whoami]:
        """Return the name, the scopes and the roots of the key; without keys every caller is `local`, and
        may all."""
        return Call("GET", "/whoami", one(models.Whoami))
