# Generated from asynchronous/methods.py by `make client`.
# Generated from the OpenAPI document by `make client`.
"""Operations of the API as methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from dcp.server.client.generated import models
from dcp.server.client.requests import (
    Call,
    PagedCall,
    given,
    if_match,
    many,
    nothing,
    one,
    query,
    segment,
)
from dcp.server.client.synchronous.connection import HttpConnection, Pages


class Methods(HttpConnection):
    """Methods of `Client` that send one request each."""

    def audit(
        self,
        *,
        page_size: int = 100,
        actor: str | None = None,
        action: str | None = None,
        target: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Pages[models.AuditEntry]:
        """Entries, newest first; actor, action and target have to be equal."""
        call = PagedCall(
            "/audit",
            one(models.AuditEntry),
            query(actor=actor, action=action, target=target, since=since, until=until),
        )
        return Pages(self._send, call, page_size)

    def checkpoints(
        self, *, page_size: int = 100, **options: Unpack[models.CheckpointQuery]
    ) -> Pages[models.Checkpoint]:
        """Checkpoints, the newest first; deleted and unreadable ones only if `state` asks for them."""
        call = PagedCall("/checkpoints", one(models.Checkpoint), query(**options))
        return Pages(self._send, call, page_size)

    def register(self, key: str, **options: Unpack[models.RegistrationOptions]) -> models.Registered:
        """Look at a checkpoint now, instead of at the next scan. A repetition changes nothing."""
        call = Call("POST", "/checkpoints", one(models.Registered), body=given({"key": key, **options}))
        return self._send(call)

    def lookup(self, **options: Unpack[models.LookupQuery]) -> models.CheckpointDetail:
        """Return the checkpoint of this name. Of several, as in other roots and formats, a committed one,
        and the newest."""
        call = Call("GET", "/checkpoints/lookup", one(models.CheckpointDetail), query(**options))
        return self._send(call)

    def delete(
        self, checkpoint_id: int, *, grace_seconds: float | None = None, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Delete a checkpoint. Its bytes stay, and it can be restored, until its grace is over."""
        call = Call(
            "DELETE",
            f"/checkpoints/{checkpoint_id}",
            one(models.CheckpointDetail),
            query(grace_seconds=grace_seconds),
            headers=if_match(etag),
        )
        return self._send(call)

    def checkpoint(self, checkpoint_id: int) -> models.CheckpointDetail:
        """All that is known of a checkpoint."""
        return self._send(Call("GET", f"/checkpoints/{checkpoint_id}", one(models.CheckpointDetail)))

    def files(self, checkpoint_id: int) -> list[models.File]:
        """Return the checkpoint's own files, as they are in the storage now."""
        return self._send(Call("GET", f"/checkpoints/{checkpoint_id}/files", many(models.File)))

    def handovers(self, checkpoint_id: int) -> list[models.Handover]:
        """List the handovers to all targets that are configured, and to earlier ones."""
        return self._send(Call("GET", f"/checkpoints/{checkpoint_id}/handovers", many(models.Handover)))

    def hand_over(self, checkpoint_id: int, target: str) -> models.Job:
        """Register the checkpoint at a target by its URL, by a job. Done again, it makes no second
        version."""
        call = Call(
            "POST", f"/checkpoints/{checkpoint_id}/handovers", one(models.Job), body=given({"target": target})
        )
        return self._send(call)

    def lineage(self, checkpoint_id: int) -> models.Lineage:
        """All ancestors and descendants that the key may see, nearest first."""
        return self._send(Call("GET", f"/checkpoints/{checkpoint_id}/lineage", one(models.Lineage)))

    def set_metrics(
        self, checkpoint_id: int, metrics: Mapping[str, Any], *, etag: str | None = None
    ) -> models.CheckpointDetail:
        """Set metrics, or remove them."""
        call = Call(
            "PATCH",
            f"/checkpoints/{checkpoint_id}/metrics",
            one(models.CheckpointDetail),
            body=given({"metrics": metrics}),
            headers=if_match(etag),
        )
        return self._send(call)

    def checkpoint_notes(self, checkpoint_id: int, *, page_size: int = 500) -> Pages[models.Note]:
        """List the notes on a checkpoint, newest first."""
        call = PagedCall(f"/checkpoints/{checkpoint_id}/notes", one(models.Note))
        return Pages(self._send, call, page_size)

    def create_checkpoint_note(self, checkpoint_id: int, text: str) -> models.Note:
        """Add a note to a checkpoint."""
        call = Call(
            "POST", f"/checkpoints/{checkpoint_id}/notes", one(models.Note), body=given({"text": text})
        )
        return self._send(call)

    def phases(self, checkpoint_id: int, **options: Unpack[models.PhasesQuery]) -> models.SavePhases:
        """Return the seconds of each phase of its save, by rank, as far as the save recorded them."""
        call = Call("GET", f"/checkpoints/{checkpoint_id}/phases", one(models.SavePhases), query(**options))
        return self._send(call)

    def unpin(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Allow that it is deleted again."""
        call = Call(
            "DELETE",
            f"/checkpoints/{checkpoint_id}/pin",
            one(models.CheckpointDetail),
            headers=if_match(etag),
        )
        return self._send(call)

    def pin(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Protect the checkpoint from deletion, also by retention."""
        call = Call(
            "PUT", f"/checkpoints/{checkpoint_id}/pin", one(models.CheckpointDetail), headers=if_match(etag)
        )
        return self._send(call)

    def restore(self, checkpoint_id: int, *, etag: str | None = None) -> models.CheckpointDetail:
        """Restore a deleted checkpoint, unless its bytes are being purged already."""
        call = Call(
            "POST",
            f"/checkpoints/{checkpoint_id}/restore",
            one(models.CheckpointDetail),
            headers=if_match(etag),
        )
        return self._send(call)

    def shards(
        self, checkpoint_id: int, *, page_size: int = 500, glob: str | None = None
    ) -> Pages[models.ShardedTensor]:
        """Tensors with the boxes that they are cut into, and the rank and file of each."""
        call = PagedCall(f"/checkpoints/{checkpoint_id}/shards", one(models.ShardedTensor), query(glob=glob))
        return Pages(self._send, call, page_size)

    def stored_chunks(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.StoredChunksQuery]
    ) -> Pages[models.StoredChunk]:
        """Chunks of the map one by one, by rank, file and place, with their numbers of copies."""
        call = PagedCall(
            f"/checkpoints/{checkpoint_id}/shards/chunks", one(models.StoredChunk), query(**options)
        )
        return Pages(self._send, call, page_size)

    def shard_map(self, checkpoint_id: int, **options: Unpack[models.ShardMapQuery]) -> models.ShardMap:
        """Return the map of shards: rows of files by rank, bins of bytes, and the largest tensor in each
        bin."""
        call = Call("GET", f"/checkpoints/{checkpoint_id}/shards/map", one(models.ShardMap), query(**options))
        return self._send(call)

    def rank_shares(self, checkpoint_id: int, *, page_size: int = 500) -> Pages[models.RankShare]:
        """Files, bytes, chunks and tensors of each rank."""
        call = PagedCall(f"/checkpoints/{checkpoint_id}/shards/ranks", one(models.RankShare))
        return Pages(self._send, call, page_size)

    def compute_statistics(self, checkpoint_id: int) -> models.Job:
        """Compute the statistics of all tensors, by a job; they are kept with the checkpoint."""
        return self._send(Call("POST", f"/checkpoints/{checkpoint_id}/statistics", one(models.Job)))

    def remove_tag(self, checkpoint_id: int, tag: str, *, etag: str | None = None) -> models.CheckpointDetail:
        """Remove a tag. A tag that the checkpoint does not have changes nothing."""
        call = Call(
            "DELETE",
            f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}",
            one(models.CheckpointDetail),
            headers=if_match(etag),
        )
        return self._send(call)

    def add_tag(self, checkpoint_id: int, tag: str, *, etag: str | None = None) -> models.CheckpointDetail:
        """Add a tag. A tag that the checkpoint has already changes nothing."""
        call = Call(
            "PUT",
            f"/checkpoints/{checkpoint_id}/tags/{segment(tag)}",
            one(models.CheckpointDetail),
            headers=if_match(etag),
        )
        return self._send(call)

    def tensors(
        self, checkpoint_id: int, *, page_size: int = 500, **options: Unpack[models.TensorQuery]
    ) -> Pages[models.Tensor]:
        """Tensors and values by name, as they were when the checkpoint was found; nothing is read."""
        call = PagedCall(f"/checkpoints/{checkpoint_id}/tensors", one(models.Tensor), query(**options))
        return Pages(self._send, call, page_size)

    def verifications(self, checkpoint_id: int, *, limit: int | None = None) -> list[models.Verification]:
        """Return the last verifications, newest first."""
        call = Call(
            "GET",
            f"/checkpoints/{checkpoint_id}/verifications",
            many(models.Verification),
            query(limit=limit),
        )
        return self._send(call)

    def verify(self, checkpoint_id: int) -> models.Job:
        """Read and compare every byte, by a job."""
        return self._send(Call("POST", f"/checkpoints/{checkpoint_id}/verifications", one(models.Job)))

    def jobs(self, *, page_size: int = 100, **options: Unpack[models.JobQuery]) -> Pages[models.Job]:
        """Jobs, newest first. Of states and kinds, any of those that are given."""
        return Pages(self._send, PagedCall("/jobs", one(models.Job), query(**options)), page_size)

    def job(self, job_id: int) -> models.Job:
        """One job, with its progress, and its result once it has succeeded."""
        return self._send(Call("GET", f"/jobs/{job_id}", one(models.Job)))

    def cancel(self, job_id: int) -> models.Job:
        """Stop the job, and remove what it left. A repetition is fine; publishing is not stopped."""
        return self._send(Call("POST", f"/jobs/{job_id}/cancel", one(models.Job)))

    def retry(self, job_id: int) -> models.Job:
        """Begin a job anew that has failed or was cancelled."""
        return self._send(Call("POST", f"/jobs/{job_id}/retry", one(models.Job)))

    def job_tasks(self, job_id: int, *, page_size: int = 500) -> Pages[models.JobTask]:
        """Return the tasks of the job by number, once it is planned."""
        return Pages(self._send, PagedCall(f"/jobs/{job_id}/tasks", one(models.JobTask)), page_size)

    def job_throughput(self, job_id: int) -> models.JobThroughput:
        """Return the speed of its tasks, and an estimate of the time that is left."""
        return self._send(Call("GET", f"/jobs/{job_id}/throughput", one(models.JobThroughput)))

    def keys(
        self,
    ) -> list[models.Key]:
        """All keys, revoked and expired ones too."""
        return self._send(Call("GET", "/keys", many(models.Key)))

    def create_key(
        self,
        name: str,
        *,
        scopes: str | Sequence[str] | None = None,
        roots: str | Sequence[str] | None = None,
        expires_in_seconds: float | None = None,
    ) -> models.CreatedKey:
        """Create a key. The answer shows it for the only time, so that it is not kept for an Idempotency-
        Key."""
        call = Call(
            "POST",
            "/keys",
            one(models.CreatedKey),
            body=given(
                {"name": name, "scopes": scopes, "roots": roots, "expires_in_seconds": expires_in_seconds}
            ),
            has_secret=True,
        )
        return self._send(call)

    def revoke_key(self, key_id: int) -> models.Key:
        """End a key at once and for ever; it stays in the list. Again is fine."""
        return self._send(Call("DELETE", f"/keys/{key_id}", one(models.Key)))

    def key(self, key_id: int) -> models.Key:
        """One key."""
        return self._send(Call("GET", f"/keys/{key_id}", one(models.Key)))

    def notes(
        self,
        *,
        page_size: int = 100,
        contains: str | None = None,
        author: str | None = None,
        root: str | None = None,
    ) -> Pages[models.Note]:
        """List all notes that the key may see, newest first."""
        call = PagedCall("/notes", one(models.Note), query(contains=contains, author=author, root=root))
        return Pages(self._send, call, page_size)

    def delete_note(self, note_id: int, *, etag: str | None = None) -> None:
        """Delete a note with all of its versions. Only the author and admins may."""
        return self._send(Call("DELETE", f"/notes/{note_id}", nothing, headers=if_match(etag)))

    def note(self, note_id: int) -> models.Note:
        """Get a note."""
        return self._send(Call("GET", f"/notes/{note_id}", one(models.Note)))

    def change_note(self, note_id: int, text: str, *, etag: str | None = None) -> models.Note:
        """Change the text. Only the author and admins may."""
        call = Call(
            "PATCH", f"/notes/{note_id}", one(models.Note), body=given({"text": text}), headers=if_match(etag)
        )
        return self._send(call)

    def note_versions(self, note_id: int) -> list[models.NoteVersion]:
        """List the texts of a note, the newest first: the present one, and up to 100 before it."""
        return self._send(Call("GET", f"/notes/{note_id}/versions", many(models.NoteVersion)))

    def retention_policies(self, *, page_size: int = 100) -> Pages[models.RetentionPolicy]:
        """List the policies of the roots that the key may see, by id."""
        call = PagedCall("/retention/policies", one(models.RetentionPolicy))
        return Pages(self._send, call, page_size)

    def delete_retention_policy(self, policy_id: int, *, etag: str | None = None) -> None:
        """Delete a policy. Checkpoints that it has deleted stay deleted."""
        call = Call("DELETE", f"/retention/policies/{policy_id}", nothing, headers=if_match(etag))
        return self._send(call)

    def retention_policy(self, policy_id: int) -> models.RetentionPolicy:
        """Get a policy."""
        return self._send(Call("GET", f"/retention/policies/{policy_id}", one(models.RetentionPolicy)))

    def change_retention_policy(
        self, policy_id: int, *, etag: str | None = None, **options: Unpack[models.PolicyChanges]
    ) -> models.RetentionPolicy:
        """Change the given fields; a job of the policy that is running stops."""
        call = Call(
            "PATCH",
            f"/retention/policies/{policy_id}",
            one(models.RetentionPolicy),
            body={**options},
            headers=if_match(etag),
        )
        return self._send(call)

    def retention_policy_totals(self, policy_id: int) -> models.RetentionTotals:
        """Add up what a policy would keep, delete and free; nothing is changed."""
        call = Call("GET", f"/retention/policies/{policy_id}/preview/totals", one(models.RetentionTotals))
        return self._send(call)

    def retention_totals(
        self, root: str, keep: Mapping[str, Any], *, run_glob: str | None = None
    ) -> models.RetentionTotals:
        """Add up what a policy would keep, delete and free; nothing is changed."""
        call = Call(
            "POST",
            "/retention/preview/totals",
            one(models.RetentionTotals),
            body=given({"root": root, "run_glob": run_glob, "keep": keep}),
            only_reads=True,
        )
        return self._send(call)

    def check_roots(
        self,
    ) -> list[models.RootCheck]:
        """Return whether the storage of each root answers: looked at now, or within the last two seconds."""
        return self._send(Call("GET", "/root-checks", many(models.RootCheck)))

    def roots(
        self,
    ) -> list[models.Root]:
        """All roots that the key may see, by name, with their last scans."""
        return self._send(Call("GET", "/roots", many(models.Root)))

    def root(self, root: str) -> models.Root:
        """One root."""
        return self._send(Call("GET", f"/roots/{segment(root)}", one(models.Root)))

    def rules(self, *, page_size: int = 100) -> Pages[models.Rule]:
        """List all rules by id."""
        return Pages(self._send, PagedCall("/rules", one(models.Rule)), page_size)

    def create_rule(
        self, name: str, actions: Sequence[Mapping[str, Any]], **options: Unpack[models.RuleOptions]
    ) -> models.Rule:
        """Create a rule, for events from now on."""
        call = Call(
            "POST", "/rules", one(models.Rule), body=given({"name": name, "actions": actions, **options})
        )
        return self._send(call)

    def delete_rule(self, rule_id: int, *, etag: str | None = None) -> None:
        """Delete a rule. Its jobs continue."""
        return self._send(Call("DELETE", f"/rules/{rule_id}", nothing, headers=if_match(etag)))

    def rule(self, rule_id: int) -> models.Rule:
        """Get a rule."""
        return self._send(Call("GET", f"/rules/{rule_id}", one(models.Rule)))

    def change_rule(
        self, rule_id: int, *, etag: str | None = None, **options: Unpack[models.RuleChanges]
    ) -> models.Rule:
        """Change the given fields, for events from now on."""
        call = Call("PATCH", f"/rules/{rule_id}", one(models.Rule), body={**options}, headers=if_match(etag))
        return self._send(call)

    def runs(self, *, page_size: int = 100, **options: Unpack[models.RunQuery]) -> Pages[models.Run]:
        """Runs, the one with the newest checkpoint first."""
        return Pages(self._send, PagedCall("/runs", one(models.Run), query(**options)), page_size)

    def compare_runs(
        self, run: Sequence[int], **options: Unpack[models.ComparisonQuery]
    ) -> models.RunComparison:
        """Up to ten runs side by side: a metric over their steps, the best checkpoints, and metadata and
        facts of the newest ones with what differs."""
        call = Call("GET", "/runs/compare", one(models.RunComparison), query(run=run, **options))
        return self._send(call)

    def run_summaries(
        self, *, page_size: int = 100, **options: Unpack[models.RunListQuery]
    ) -> Pages[models.RunSummary]:
        """Runs with a metric's last value, minimum and maximum, sorted by one of these. What has changed
        is summed up by a worker within a second or two."""
        call = PagedCall("/runs/summaries", one(models.RunSummary), query(**options))
        return Pages(self._send, call, page_size)

    def run(self, run_id: int) -> models.Run:
        """One run."""
        return self._send(Call("GET", f"/runs/{run_id}", one(models.Run)))

    def aliases(self, run_id: int) -> list[models.Alias]:
        """All aliases of a run, by name."""
        return self._send(Call("GET", f"/runs/{run_id}/aliases", many(models.Alias)))

    def alias(self, run_id: int, name: str) -> models.Alias:
        """Return the checkpoint that the alias names."""
        return self._send(Call("GET", f"/runs/{run_id}/aliases/{segment(name)}", one(models.Alias)))

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
        call = Call(
            "PUT",
            f"/runs/{run_id}/aliases/{segment(name)}",
            one(models.Alias),
            body=given({"checkpoint_id": checkpoint_id, "is_protected": is_protected}),
            headers=if_match(etag),
        )
        return self._send(call)

    def run_drift(self, run_id: int) -> models.RunDrift:
        """Return the result of the last job; not found before the first one, and once that job is
        forgotten."""
        return self._send(Call("GET", f"/runs/{run_id}/drift", one(models.RunDrift)))

    def compute_drift(self, run_id: int) -> models.Job:
        """Compute it for up to 50 steps, by a job; `POST /jobs` with the kind `drift` chooses the steps."""
        return self._send(Call("POST", f"/runs/{run_id}/drift", one(models.Job)))

    def run_notes(
        self, run_id: int, *, page_size: int = 500, with_checkpoints: bool | None = None
    ) -> Pages[models.Note]:
        """List the notes on a run, newest first."""
        call = PagedCall(f"/runs/{run_id}/notes", one(models.Note), query(with_checkpoints=with_checkpoints))
        return Pages(self._send, call, page_size)

    def create_run_note(self, run_id: int, text: str) -> models.Note:
        """Add a note to a run."""
        call = Call("POST", f"/runs/{run_id}/notes", one(models.Note), body=given({"text": text}))
        return self._send(call)

    def run_series(self, run_id: int, metric: str, *, points: int | None = None) -> models.Series:
        """Return a metric over the steps of a run; of more checkpoints than points, each point is of
        several."""
        call = Call("GET", f"/runs/{run_id}/series", one(models.Series), query(metric=metric, points=points))
        return self._send(call)

    def run_tensor_bytes(
        self, run_id: int, *, only: str | Sequence[str] | None = None, below_step: int | None = None
    ) -> models.TensorBytes:
        """Return the bytes of tensors in the checkpoints of a run, by their names; of optimizers by
        default."""
        call = Call(
            "GET",
            f"/runs/{run_id}/tensor-bytes",
            one(models.TensorBytes),
            query(only=only, below_step=below_step),
        )
        return self._send(call)

    def run_timeline(self, run_id: int, **options: Unpack[models.TimelineQuery]) -> models.RunTimeline:
        """Return the checkpoints of a run over its steps, of all states, neighbours summed up: bytes,
        seconds of saving, metrics, states, aliases."""
        call = Call("GET", f"/runs/{run_id}/timeline", one(models.RunTimeline), query(**options))
        return self._send(call)

    def webhooks(self, *, page_size: int = 100) -> Pages[models.Webhook]:
        """List the webhooks that the key may see, by id."""
        return Pages(self._send, PagedCall("/webhooks", one(models.Webhook)), page_size)

    def create_webhook(self, url: str, **options: Unpack[models.WebhookOptions]) -> models.WebhookSecret:
        """Create a webhook. The answer shows its secret, once: no Idempotency-Key keeps it."""
        call = Call(
            "POST",
            "/webhooks",
            one(models.WebhookSecret),
            body=given({"url": url, **options}),
            has_secret=True,
        )
        return self._send(call)

    def delete_webhook(self, webhook_id: int, *, etag: str | None = None) -> None:
        """Delete a webhook and its deliveries."""
        return self._send(Call("DELETE", f"/webhooks/{webhook_id}", nothing, headers=if_match(etag)))

    def webhook(self, webhook_id: int) -> models.Webhook:
        """Get a webhook."""
        return self._send(Call("GET", f"/webhooks/{webhook_id}", one(models.Webhook)))

    def change_webhook(
        self, webhook_id: int, *, etag: str | None = None, **options: Unpack[models.WebhookChanges]
    ) -> models.Webhook:
        """Change the given fields. Deliveries that wait for a disabled webhook are sent once it is
        enabled."""
        call = Call(
            "PATCH", f"/webhooks/{webhook_id}", one(models.Webhook), body={**options}, headers=if_match(etag)
        )
        return self._send(call)

    def deliveries(
        self, webhook_id: int, *, page_size: int = 500, state: str | None = None
    ) -> Pages[models.Delivery]:
        """List deliveries, newest event first. Old ones are forgotten."""
        call = PagedCall(f"/webhooks/{webhook_id}/deliveries", one(models.Delivery), query(state=state))
        return Pages(self._send, call, page_size)

    def redeliver(self, webhook_id: int, delivery_id: int) -> models.Delivery:
        """Make a delivery again, from its first attempt on."""
        call = Call(
            "POST", f"/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", one(models.Delivery)
        )
        return self._send(call)

    def rotate_webhook_secret(
        self,
        webhook_id: int,
        *,
        secret: str | None = None,
        overlap_seconds: float | None = None,
        etag: str | None = None,
    ) -> models.WebhookSecret:
        """Give it a new secret. Until the overlap is over, deliveries carry signatures of both."""
        call = Call(
            "POST",
            f"/webhooks/{webhook_id}/rotate-secret",
            one(models.WebhookSecret),
            body=given({"secret": secret, "overlap_seconds": overlap_seconds}),
            headers=if_match(etag),
            has_secret=True,
        )
        return self._send(call)

    def test_webhook(self, webhook_id: int) -> models.Delivery:
        """Send it an event of the type `webhook.test`; a worker does so within seconds."""
        return self._send(Call("POST", f"/webhooks/{webhook_id}/test", one(models.Delivery)))

    def whoami(
        self,
    ) -> models.Whoami:
        """Return the name, the scopes and the roots of the key; without keys every caller is `local`, and
        may all."""
        return self._send(Call("GET", "/whoami", one(models.Whoami)))
