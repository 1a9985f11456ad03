# Generated from asynchronous/methods.py by `make client`.
# Generated from the OpenAPI document by `make client`.
"""Operations of the API as methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from dcp.server.client.generated import models
from dcp.server.client.requests import given, many, nothing, one, query, segment
from dcp.server.client.synchronous.connection import HttpConnection, Pages


class Methods(HttpConnection):
    """Methods of `Client` that send one request each."""

    def own_account(
        self,
    ) -> models.Account:
        """Get the account of the caller; `/whoami` has its rights."""
        return self._call("GET", "/account", one(models.Account))

    def own_keys(
        self,
    ) -> list[models.Key]:
        """List the keys of the caller's account, revoked and expired ones too."""
        return self._call("GET", "/account/keys", many(models.Key))

    def accounts(
        self, *, page_size: int = 100, kind: str | None = None, q: str | None = None
    ) -> Pages[models.Account]:
        """List people and service accounts, by id."""
        return self._pages(page_size, "/accounts", one(models.Account), query(kind=kind, q=q))

    def create_account(self, name: str, *, title: str | None = None) -> models.Account:
        """Create a service account."""
        path = "/accounts"
        return self._call("POST", path, one(models.Account), body=given({"name": name, "title": title}))

    def account(self, account_id: int) -> models.Account:
        """Get a person or a service account."""
        return self._call("GET", f"/accounts/{account_id}", one(models.Account))

    def change_account(
        self,
        account_id: int,
        *,
        is_disabled: bool | None = None,
        title: str | None = None,
        etag: str | None = None,
    ) -> models.Account:
        """Disable or enable an account. One that is disabled has neither sessions nor keys that work."""
        path = f"/accounts/{account_id}"
        return self._call(
            "PATCH",
            path,
            one(models.Account),
            body=given({"is_disabled": is_disabled, "title": title}),
            etag=etag,
        )

    def account_keys(self, account_id: int) -> list[models.Key]:
        """List the keys of an account, revoked and expired ones too (in the roots of the admin)."""
        return self._call("GET", f"/accounts/{account_id}/keys", many(models.Key))

    def sign_out_account(self, account_id: int) -> None:
        """End all sessions of an account. Its keys stay."""
        return self._call("POST", f"/accounts/{account_id}/sign-out", nothing)

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
    ) -> Pages[models.AuditEntry]:
        """Entries, newest first; actor, action, target and root have to be equal."""
        path = "/audit"
        return self._pages(
            page_size,
            path,
            one(models.AuditEntry),
            query(actor=actor, action=action, target=target, root=root, since=since, until=until),
        )

    def checkpoints(
        self, *, page_size: int = 100, **options: Unpack[models.CheckpointQuery]
    ) -> Pages[models.Checkpoint]:
        """Checkpoints, the newest first; deleted and unreadable ones only if `state` asks for them."""
        return self._pages(page_size, "/checkpoints", one(models.Checkpoint), query(**options))

    def register(self, key: str, **options: Unpack[models.RegistrationOptions]) -> models.Registered:
        """Look at a checkpoint now, instead of at the next scan. A repetition changes nothing."""
        path = "/checkpoints"
        return self._call("POST", path, one(models.Registered), body=given({"key": key, **options}))

    def lookup(self, **options: Unpack[models.LookupQuery]) -> models.CheckpointDetail:
        """Return the checkpoint of this name. Of several, as in other roots and formats, a committed one,
        and the newest."""
        return self._call("GET", "/checkpoints/lookup", one(models.CheckpointDetail), query(**options))

    def delete(
        self, checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Delete a checkpoint. Its bytes stay, and it can be restored, until its grace is over."""
        path = f"/checkpoints/{checkpoint_id}"
        return self._call(
            "DELETE", path, one(models.CheckpointDetail), query(grace_seconds=grace_seconds), etag=etag
        )

    def checkpoint(self, checkpoint_id: int) -> models.CheckpointDetail:
        """All that is known of a checkpoint."""
        return self._call("GET", f"/checkpoints/{checkpoint_id}", one(models.CheckpointDetail))

    def compute_digests(self, checkpoint_id: int) -> models.Job:
        """Compute the digests of its tensors, by a job, so that checkpoints with the same are found."""
        return self._call("POST", f"/checkpoints/{checkpoint_id}/digests", one(models.Job))

    def files(self, checkpoint_id: int) -> list[models.File]:
        """Return the checkpoint's own files, as they are in the storage now."""
        return self._call("GET", f"/checkpoints/{checkpoint_id}/files", many(models.File))

    def handovers(self, checkpoint_id: int) -> list[models.Handover]:
        """List the handovers to all targets that are configured, and to earlier ones."""
        return self._call("GET", f"/checkpoints/{checkpoint_id}/handovers", many(models.Handover))

    def hand_over(self, checkpoint_id: int, target: str) -> models.Job:
        """Register the checkpoint at a target by its URL, by a job. Done again, it makes no second
        version."""
        path = f"/checkpoints/{checkpoint_id}/handovers"
        return self._call("POST", path, one(models.Job), body=given({"target": target}))

    def lineage(self, checkpoint_id: int) -> models.Lineage:
        """All ancestors and descendants that the key may see, nearest first."""
        return self._call("GET", f"/checkpoints/{checkpoint_id}/lineage", one(models.Lineage))

    def set_metrics(
        self, checkpoint_id: int, metrics: Mapping[str, Any], *, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Set metrics, or remove them."""
        path = f"/checkpoints/{checkpoint_id}/metrics"
        return self._call(
            "PATCH", path, one(models.CheckpointDetail), body=given({"metrics": metrics}), etag=etag
        )

    def checkpoint_notes(self, checkpoint_id: int, *, page_size: int = 500) -> Pages[models.Note]:
        """List the notes on a checkpoint, newest first."""
        return self._pages(page_size, f"/checkpoints/{checkpoint_id}/notes", one(models.Note))

    def create_checkpoint_note(self, checkpoint_id: int, text: str) -> models.Note:
        """Add a note to a checkpoint."""
        path = f"/checkpoints/{checkpoint_id}/notes"
        return self._call("POST", path, one(models.Note), body=given({"text": text}))

    def phases(self, checkpoint_id: int, **options: Unpack[models.PhasesQuery]) -> models.SavePhases:
        """Return the seconds of each phase of its save, by rank, as far as the save recorded them."""
        path = f"/checkpoints/{checkpoint_id}/phases"
        return self._call("GET", path, one(models.SavePhases), query(**options))

    def unpin(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Allow that it is deleted again."""
        path = f"/checkpoints/{checkpoint_id}/pin"
        return self._call("DELETE", path, one(models.CheckpointDetail), etag=etag)

    def pin(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Protect the checkpoint from deletion, also by retention."""
        path = f"/checkpoints/{checkpoint_id}/pin"
        return self._call("PUT", path, one(models.CheckpointDetail), etag=etag)

    def restore(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Restore a deleted checkpoint, unless its bytes are being purged already."""
        path = f"/checkpoints/{checkpoint_id}/restore"
        return self._call("POST", path, one(models.CheckpointDetail), etag=etag)

    def shards(
        self, checkpoint_id: int, *, page_size: int = 500, glob: str | None = None
    ) -> Pages[models.ShardedTensor]:
        """Tensors with the boxes that they are cut into, and the rank and file of each."""
        path = f"/checkpoints/{checkpoint_id}/shards"
        return self._pages(page_size, path, one(models.ShardedTensor), query(glob=glob))

    def stored_chunks(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.StoredChunksQuery]
    ) -> Pages[models.StoredChunk]:
        """Chunks of the map one by one, by rank, file and place, with their numbers of copies."""
        path = f"/checkpoints/{checkpoint_id}/shards/chunks"
        return self._pages(page_size, path, one(models.StoredChunk), query(**options))

    def shard_map(self, checkpoint_id: int, **options: Unpack[models.ShardMapQuery]) -> models.ShardMap:
        """Return the map of shards: rows of files by rank, bins of bytes, and the largest tensor in each
        bin."""
        path = f"/checkpoints/{checkpoint_id}/shards/map"
        return self._call("GET", path, one(models.ShardMap), query(**options))

    def rank_shares(self, checkpoint_id: int, *, page_size: int = 500) -> Pages[models.RankShare]:
        """Files, bytes, chunks and tensors of each rank."""
        return self._pages(page_size, f"/checkpoints/{checkpoint_id}/shards/ranks", one(models.RankShare))

    def request_stage(
        self, checkpoint_id: int, stage: str, *, reason: str | None = None, etag: str | None = None
    ) -> models.StageRequest:
        """Request that a checkpoint is promoted to a stage. If that needs no approval, it is promoted at
        once."""
        path = f"/checkpoints/{checkpoint_id}/stage-requests"
        return self._call(
            "POST", path, one(models.StageRequest), body=given({"stage": stage, "reason": reason}), etag=etag
        )

    def compute_statistics(self, checkpoint_id: int) -> models.Job:
        """Compute the statistics of all tensors, by a job; they are kept with the checkpoint."""
        return self._call("POST", f"/checkpoints/{checkpoint_id}/statistics", one(models.Job))

    def remove_tag(self, checkpoint_id: int, tag: str, *, etag: str | None = None) -> models.CheckpointDetail:
        """Remove a tag. A tag that the checkpoint does not have changes nothing."""
        path = f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}"
        return self._call("DELETE", path, one(models.CheckpointDetail), etag=etag)

    def add_tag(self, checkpoint_id: int, tag: str, *, etag: str | None = None) -> models.CheckpointDetail:
        """Add a tag. A tag that the checkpoint has already changes nothing."""
        path = f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}"
        return self._call("PUT", path, one(models.CheckpointDetail), etag=etag)

    def tensors(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.TensorQuery]
    ) -> Pages[models.Tensor]:
        """Tensors and values by name, as they were when the checkpoint was found; nothing is read."""
        path = f"/checkpoints/{checkpoint_id}/tensors"
        return self._pages(page_size, path, one(models.Tensor), query(**options))

    def verifications(self, checkpoint_id: int, *, limit: int | None = None) -> list[models.Verification]:
        """Return the last verifications, newest first."""
        path = f"/checkpoints/{checkpoint_id}/verifications"
        return self._call("GET", path, many(models.Verification), query(limit=limit))

    def verify(self, checkpoint_id: int) -> models.Job:
        """Read and compare every byte, by a job."""
        return self._call("POST", f"/checkpoints/{checkpoint_id}/verifications", one(models.Job))

    def grants(
        self, *, page_size: int = 100, account_id: int | None = None, group: str | None = None
    ) -> Pages[models.Grant]:
        """List grants by id; those in its roots alone for an admin of some."""
        return self._pages(page_size, "/grants", one(models.Grant), query(account_id=account_id, group=group))

    def create_grant(
        self, role: str, *, account_id: int | None = None, group: str | None = None, root: str | None = None
    ) -> models.Grant:
        """Grant a role; an account or group has one in each root, and one for all roots beside."""
        path = "/grants"
        return self._call(
            "POST",
            path,
            one(models.Grant),
            body=given({"account_id": account_id, "group": group, "role": role, "root": root}),
        )

    def delete_grant(self, grant_id: int, *, etag: str | None = None) -> None:
        """Revoke a role: it ends at once, also for keys and sessions."""
        return self._call("DELETE", f"/grants/{grant_id}", nothing, etag=etag)

    def grant(self, grant_id: int) -> models.Grant:
        """Get a grant."""
        return self._call("GET", f"/grants/{grant_id}", one(models.Grant))

    def change_grant(self, grant_id: int, role: str, *, etag: str | None = None) -> models.Grant:
        """Change the role."""
        path = f"/grants/{grant_id}"
        return self._call("PATCH", path, one(models.Grant), body=given({"role": role}), etag=etag)

    def jobs(self, *, page_size: int = 100, **options: Unpack[models.JobQuery]) -> Pages[models.Job]:
        """Jobs, newest first. Of states and kinds, any of those that are given."""
        return self._pages(page_size, "/jobs", one(models.Job), query(**options))

    def job(self, job_id: int) -> models.Job:
        """One job, with its progress, and its result once it has succeeded."""
        return self._call("GET", f"/jobs/{job_id}", one(models.Job))

    def cancel(self, job_id: int) -> models.Job:
        """Stop the job, and remove what it left. A repetition is fine; publishing is not stopped."""
        return self._call("POST", f"/jobs/{job_id}/cancel", one(models.Job))

    def retry(self, job_id: int) -> models.Job:
        """Begin a job anew that has failed or was cancelled."""
        return self._call("POST", f"/jobs/{job_id}/retry", one(models.Job))

    def job_tasks(self, job_id: int, *, page_size: int = 500) -> Pages[models.JobTask]:
        """Return the tasks of the job by number, once it is planned."""
        return self._pages(page_size, f"/jobs/{job_id}/tasks", one(models.JobTask))

    def job_throughput(self, job_id: int) -> models.JobThroughput:
        """Return the speed of its tasks, and an estimate of the time that is left."""
        return self._call("GET", f"/jobs/{job_id}/throughput", one(models.JobThroughput))

    def keys(
        self,
    ) -> list[models.Key]:
        """All keys, revoked and expired ones too; for admins of some roots those of these roots alone."""
        return self._call("GET", "/keys", many(models.Key))

    def create_key(
        self,
        name: str,
        *,
        scopes: str | Sequence[str] | None = None,
        roots: str | Sequence[str] | None = None,
        expires_in_seconds: float | None = None,
        account_id: int | None = None,
    ) -> models.CreatedKey:
        """Create a key. The answer shows it for the only time, so that it is not kept for an Idempotency-
        Key."""
        path = "/keys"
        return self._call(
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

    def revoke_key(self, key_id: int) -> models.Key:
        """End a key at once and for ever; it stays in the list. Again is fine."""
        return self._call("DELETE", f"/keys/{key_id}", one(models.Key))

    def key(self, key_id: int) -> models.Key:
        """One key."""
        return self._call("GET", f"/keys/{key_id}", one(models.Key))

    def notes(
        self,
        *,
        page_size: int = 100,
        contains: str | None = None,
        author: str | None = None,
        root: str | None = None,
    ) -> Pages[models.Note]:
        """List all notes that the key may see, newest first."""
        path = "/notes"
        return self._pages(
            page_size, path, one(models.Note), query(contains=contains, author=author, root=root)
        )

    def delete_note(self, note_id: int, *, etag: str | None = None) -> None:
        """Delete a note with all of its versions. Only the author and admins may."""
        return self._call("DELETE", f"/notes/{note_id}", nothing, etag=etag)

    def note(self, note_id: int) -> models.Note:
        """Get a note."""
        return self._call("GET", f"/notes/{note_id}", one(models.Note))

    def change_note(self, note_id: int, text: str, *, etag: str | None = None) -> models.Note:
        """Change the text. Only the author and admins may."""
        path = f"/notes/{note_id}"
        return self._call("PATCH", path, one(models.Note), body=given({"text": text}), etag=etag)

    def note_versions(self, note_id: int) -> list[models.NoteVersion]:
        """List the texts of a note, the newest first: the present one, and up to 100 before it."""
        return self._call("GET", f"/notes/{note_id}/versions", many(models.NoteVersion))

    def quotas(self, *, page_size: int = 100) -> Pages[models.Quota]:
        """List the stored quotas, by id. Others have the defaults of the settings."""
        return self._pages(page_size, "/quotas", one(models.Quota))

    def create_quota(
        self, kind: str, subject: str, limits: Mapping[str, Any], *, note: str | None = None
    ) -> models.Quota:
        """Store limits for an account, a key or a root. They hold at once, in all processes."""
        path = "/quotas"
        return self._call(
            "POST",
            path,
            one(models.Quota),
            body=given({"kind": kind, "subject": subject, "limits": limits, "note": note}),
        )

    def quota_usage(
        self, *, kind: str | None = None, q: str | None = None, limit: int | None = None
    ) -> list[models.SubjectUse]:
        """List use and limits of accounts, keys or roots: those nearest to a limit first, then by bytes."""
        path = "/quotas/usage"
        return self._call("GET", path, many(models.SubjectUse), query(kind=kind, q=q, limit=limit))

    def delete_quota(self, quota_id: int, *, etag: str | None = None) -> None:
        """Delete a quota: the defaults hold again."""
        return self._call("DELETE", f"/quotas/{quota_id}", nothing, etag=etag)

    def quota(self, quota_id: int) -> models.Quota:
        """Get a quota."""
        return self._call("GET", f"/quotas/{quota_id}", one(models.Quota))

    def change_quota(
        self,
        quota_id: int,
        *,
        limits: Mapping[str, Any] | None = None,
        note: str | None = None,
        etag: str | None = None,
    ) -> models.Quota:
        """Change the given fields; limits that are given take the place of all that were stored."""
        path = f"/quotas/{quota_id}"
        return self._call(
            "PATCH", path, one(models.Quota), body=given({"limits": limits, "note": note}), etag=etag
        )

    def retention_policies(self, *, page_size: int = 100) -> Pages[models.RetentionPolicy]:
        """List the policies of the roots that the key may see, by id."""
        return self._pages(page_size, "/retention/policies", one(models.RetentionPolicy))

    def delete_retention_policy(self, policy_id: int, *, etag: str | None = None) -> None:
        """Delete a policy. Checkpoints that it has deleted stay deleted."""
        return self._call("DELETE", f"/retention/policies/{policy_id}", nothing, etag=etag)

    def retention_policy(self, policy_id: int) -> models.RetentionPolicy:
        """Get a policy."""
        return self._call("GET", f"/retention/policies/{policy_id}", one(models.RetentionPolicy))

    def change_retention_policy(
        self, policy_id: int, *, etag: str | None = None, **options: Unpack[models.PolicyChanges]
    ) -> models.RetentionPolicy:
        """Change the given fields; a job of the policy that is running stops."""
        path = f"/retention/policies/{policy_id}"
        return self._call("PATCH", path, one(models.RetentionPolicy), body={**options}, etag=etag)

    def retention_policy_totals(self, policy_id: int) -> models.RetentionTotals:
        """Add up what a policy would keep, delete and free; nothing is changed."""
        path = f"/retention/policies/{policy_id}/preview/totals"
        return self._call("GET", path, one(models.RetentionTotals))

    def retention_totals(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str | None = None
    ) -> models.RetentionTotals:
        """Add up what a policy would keep, delete and free; nothing is changed."""
        path = "/retention/preview/totals"
        return self._call(
            "POST",
            path,
            one(models.RetentionTotals),
            body=given({"root": root, "run_glob": run_glob, "keep": keep}),
            only_reads=True,
        )

    def check_roots(
        self,
    ) -> list[models.RootCheck]:
        """Return whether the storage of each root answers: looked at now, or within the last two seconds."""
        return self._call("GET", "/root-checks", many(models.RootCheck))

    def roots(
        self,
    ) -> list[models.Root]:
        """All roots that the key may see, by name, with their last scans."""
        return self._call("GET", "/roots", many(models.Root))

    def root(self, root: str) -> models.Root:
        """One root."""
        return self._call("GET", f"/roots/{segment(root)}", one(models.Root))

    def rules(self, *, page_size: int = 100) -> Pages[models.Rule]:
        """List the rules by id; those of its roots alone for a key of some roots."""
        return self._pages(page_size, "/rules", one(models.Rule))

    def create_rule(
        self, name: str, actions: Sequence[Mapping[str, Any]], **options: Unpack[models.RuleOptions]
    ) -> models.Rule:
        """Create a rule, for events from now on."""
        path = "/rules"
        return self._call(
            "POST", path, one(models.Rule), body=given({"name": name, "actions": actions, **options})
        )

    def delete_rule(self, rule_id: int, *, etag: str | None = None) -> None:
        """Delete a rule. Its jobs continue."""
        return self._call("DELETE", f"/rules/{rule_id}", nothing, etag=etag)

    def rule(self, rule_id: int) -> models.Rule:
        """Get a rule."""
        return self._call("GET", f"/rules/{rule_id}", one(models.Rule))

    def change_rule(
        self, rule_id: int, *, etag: str | None = None, **options: Unpack[models.RuleChanges]
    ) -> models.Rule:
        """Change the given fields, for events from now on."""
        return self._call("PATCH", f"/rules/{rule_id}", one(models.Rule), body={**options}, etag=etag)

    def runs(self, *, page_size: int = 100, **options: Unpack[models.RunQuery]) -> Pages[models.Run]:
        """Runs, the one with the newest checkpoint first."""
        return self._pages(page_size, "/runs", one(models.Run), query(**options))

    def compare_runs(
        self, run: Sequence[int], **options: Unpack[models.ComparisonQuery]
    ) -> models.RunComparison:
        """Up to ten runs side by side: a metric over their steps, the best checkpoints, and metadata and
        facts of the newest ones with what differs."""
        return self._call("GET", "/runs/compare", one(models.RunComparison), query(run=run, **options))

    def run_summaries(
        self, *, page_size: int = 100, **options: Unpack[models.RunListQuery]
    ) -> Pages[models.RunSummary]:
        """Runs with a metric's last value, minimum and maximum, sorted by one of these. What has changed
        is summed up by a worker within a second or two."""
        return self._pages(page_size, "/runs/summaries", one(models.RunSummary), query(**options))

    def run(self, run_id: int) -> models.Run:
        """One run."""
        return self._call("GET", f"/runs/{run_id}", one(models.Run))

    def run_activity(self, run_id: int) -> models.RunActivity:
        """Tell from its checkpoints whether a run is training: their interval, and the next expected one."""
        return self._call("GET", f"/runs/{run_id}/activity", one(models.RunActivity))

    def aliases(self, run_id: int) -> list[models.Alias]:
        """All aliases of a run, by name."""
        return self._call("GET", f"/runs/{run_id}/aliases", many(models.Alias))

    def alias(self, run_id: int, name: str) -> models.Alias:
        """Return the checkpoint that the alias names."""
        return self._call("GET", f"/runs/{run_id}/aliases/{segment(name)}", one(models.Alias))

    def set_alias(
        self,
        run_id: int,
        name: str,
        checkpoint_id: int,
        *,
        is_protected: bool | None = None,
        etag: str | None = None,
    ) -> models.Alias:
        """Let the alias name this checkpoint of the run. Without If-Match only if there is no such alias
        yet."""
        path = f"/runs/{run_id}/aliases/{segment(name)}"
        return self._call(
            "PUT",
            path,
            one(models.Alias),
            body=given({"checkpoint_id": checkpoint_id, "is_protected": is_protected}),
            etag=etag,
        )

    def run_drift(self, run_id: int) -> models.RunDrift:
        """Return the result of the last job; not found before the first one, and once that job is
        forgotten."""
        return self._call("GET", f"/runs/{run_id}/drift", one(models.RunDrift))

    def compute_drift(self, run_id: int) -> models.Job:
        """Compute it for up to 50 steps, by a job; `POST /jobs` with the kind `drift` chooses the steps."""
        return self._call("POST", f"/runs/{run_id}/drift", one(models.Job))

    def watch_run(self, run_id: int) -> None:
        """Changes of a run, as server-sent events: new checkpoints, labels, verdicts, deletions."""
        return self._call("GET", f"/runs/{run_id}/events", nothing)

    def run_notes(
        self, run_id: int, *, page_size: int = 500, with_checkpoints: bool | None = None
    ) -> Pages[models.Note]:
        """List the notes on a run, newest first."""
        path = f"/runs/{run_id}/notes"
        return self._pages(page_size, path, one(models.Note), query(with_checkpoints=with_checkpoints))

    def create_run_note(self, run_id: int, text: str) -> models.Note:
        """Add a note to a run."""
        return self._call("POST", f"/runs/{run_id}/notes", one(models.Note), body=given({"text": text}))

    def run_series(self, run_id: int, metric: str, *, points: int | None = None) -> models.Series:
        """Return a metric over the steps of a run; of more checkpoints than points, each point is of
        several."""
        path = f"/runs/{run_id}/series"
        return self._call("GET", path, one(models.Series), query(metric=metric, points=points))

    def run_stages(self, run_id: int) -> list[models.StageHolder]:
        """List the checkpoints of a run that are in stages, those in the highest last."""
        return self._call("GET", f"/runs/{run_id}/stages", many(models.StageHolder))

    def stage_history(self, run_id: int, *, page_size: int = 500) -> Pages[models.StageEntry]:
        """List all that was requested, decided and changed about the stages of a run, newest first."""
        return self._pages(page_size, f"/runs/{run_id}/stages/history", one(models.StageEntry))

    def demote_checkpoint(
        self, run_id: int, stage: str, checkpoint_id: int, *, reason: str | None = None
    ) -> None:
        """Take a checkpoint out of a stage; the alias of that name is removed. Who may approve may;
        without approvals, who may request."""
        path = f"/runs/{run_id}/stages/{segment(stage)}/demote"
        return self._call(
            "POST", path, nothing, body=given({"checkpoint_id": checkpoint_id, "reason": reason})
        )

    def run_tensor_bytes(
        self, run_id: int, *, only: str | Sequence[str] | None = None, below_step: int | None = None
    ) -> models.TensorBytes:
        """Return the bytes of tensors in the checkpoints of a run, by their names; of optimizers by
        default."""
        path = f"/runs/{run_id}/tensor-bytes"
        return self._call("GET", path, one(models.TensorBytes), query(only=only, below_step=below_step))

    def run_timeline(self, run_id: int, **options: Unpack[models.TimelineQuery]) -> models.RunTimeline:
        """Return the checkpoints of a run over its steps, of all states, neighbours summed up: bytes,
        seconds of saving, metrics, states, aliases."""
        return self._call("GET", f"/runs/{run_id}/timeline", one(models.RunTimeline), query(**options))

    def stage_requests(
        self,
        *,
        page_size: int = 100,
        run_id: int | None = None,
        checkpoint_id: int | None = None,
        stage: str | None = None,
        state: str | None = None,
    ) -> Pages[models.StageRequest]:
        """List requests, newest first. Those with the state `requested` are open."""
        path = "/stage-requests"
        return self._pages(
            page_size,
            path,
            one(models.StageRequest),
            query(run_id=run_id, checkpoint_id=checkpoint_id, stage=stage, state=state),
        )

    def stage_request(self, request_id: int) -> models.StageRequest:
        """Get a request."""
        return self._call("GET", f"/stage-requests/{request_id}", one(models.StageRequest))

    def approve_stage_request(
        self, request_id: int, *, reason: str | None = None, etag: str | None = None
    ) -> models.StageRequest:
        """Approve a request. The last approval that it needs promotes the checkpoint as it was requested:
        if its content has changed since, the answer is 409."""
        path = f"/stage-requests/{request_id}/approve"
        return self._call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    def reject_stage_request(
        self, request_id: int, reason: str, *, etag: str | None = None
    ) -> models.StageRequest:
        """Reject a request. Who may approve it may."""
        path = f"/stage-requests/{request_id}/reject"
        return self._call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    def withdraw_stage_request(
        self, request_id: int, *, reason: str | None = None, etag: str | None = None
    ) -> models.StageRequest:
        """Withdraw one's own request. Admins may withdraw any."""
        path = f"/stage-requests/{request_id}/withdraw"
        return self._call("POST", path, one(models.StageRequest), body=given({"reason": reason}), etag=etag)

    def stages(
        self,
    ) -> list[models.Stage]:
        """List the stages from the lowest to the highest, with their rules and what the caller may do."""
        return self._call("GET", "/stages", many(models.Stage))

    def usage(
        self,
    ) -> models.Usage:
        """Return use and limits of the caller's account and key, and of the roots that it may see."""
        return self._call("GET", "/usage", one(models.Usage))

    def webhooks(self, *, page_size: int = 100) -> Pages[models.Webhook]:
        """List the webhooks that the key may see, by id."""
        return self._pages(page_size, "/webhooks", one(models.Webhook))

    def create_webhook(self, url: str, **options: Unpack[models.WebhookOptions]) -> models.WebhookSecret:
        """Create a webhook. The answer shows its secret, once: no Idempotency-Key keeps it."""
        path = "/webhooks"
        return self._call(
            "POST", path, one(models.WebhookSecret), body=given({"url": url, **options}), has_secret=True
        )

    def delete_webhook(self, webhook_id: int, *, etag: str | None = None) -> None:
        """Delete a webhook and its deliveries."""
        return self._call("DELETE", f"/webhooks/{webhook_id}", nothing, etag=etag)

    def webhook(self, webhook_id: int) -> models.Webhook:
        """Get a webhook."""
        return self._call("GET", f"/webhooks/{webhook_id}", one(models.Webhook))

    def change_webhook(
        self, webhook_id: int, *, etag: str | None = None, **options: Unpack[models.WebhookChanges]
    ) -> models.Webhook:
        """Change the given fields. Deliveries that wait for a disabled webhook are sent once it is
        enabled."""
        path = f"/webhooks/{webhook_id}"
        return self._call("PATCH", path, one(models.Webhook), body={**options}, etag=etag)

    def deliveries(
        self, webhook_id: int, *, page_size: int = 500, state: str | None = None
    ) -> Pages[models.Delivery]:
        """List deliveries, newest event first. Old ones are forgotten."""
        path = f"/webhooks/{webhook_id}/deliveries"
        return self._pages(page_size, path, one(models.Delivery), query(state=state))

    def redeliver(self, webhook_id: int, delivery_id: int) -> models.Delivery:
        """Make a delivery again, from its first attempt on."""
        path = f"/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"
        return self._call("POST", path, one(models.Delivery))

    def rotate_webhook_secret(
        self,
        webhook_id: int,
        *,
        secret: str | None = None,
        overlap_seconds: float | None = None,
        etag: str | None = None,
    ) -> models.WebhookSecret:
        """Give it a new secret. Until the overlap is over, deliveries carry signatures of both."""
        path = f"/webhooks/{webhook_id}/rotate-secret"
        return self._call(
            "POST",
            path,
            one(models.WebhookSecret),
            body=given({"secret": secret, "overlap_seconds": overlap_seconds}),
            etag=etag,
            has_secret=True,
        )

    def test_webhook(self, webhook_id: int) -> models.Delivery:
        """Send it an event of the type `webhook.test`; a worker does so within seconds."""
        return self._call("POST", f"/webhooks/{webhook_id}/test", one(models.Delivery))

    def whoami(
        self,
    ) -> models.Whoami:
        """Return the name, the scopes and the roots of the key; without keys every caller is `local`, and
        may all."""
        return self._call("GET", "/whoami", one(models.Whoami))
