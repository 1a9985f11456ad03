"""The first tables.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Float,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Text,
    UniqueConstraint,
    false,
    true,
)
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

ID = BigInteger().with_variant(Integer(), "sqlite")
NAME = Text().with_variant(Text(collation="C"), "postgresql")
JSON_ = JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    """Everything."""
    op.create_table(
        "api_keys",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("name", String(128), nullable=False),
        Column("prefix", String(16), nullable=False),
        Column("hash", LargeBinary(32), nullable=False),
        Column("scopes", JSON_, nullable=False),
        Column("roots", JSON_),
        Column("created_seconds", Float, nullable=False),
        Column("expires_seconds", Float),
        Column("revoked_seconds", Float),
        Column("used_seconds", Float),
        PrimaryKeyConstraint("id", name="pk_api_keys"),
        UniqueConstraint("prefix", name="uq_api_keys_prefix"),
    )
    op.create_table(
        "audit",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("at_seconds", Float, nullable=False),
        Column("actor", String(128), nullable=False),
        Column("action", String(64), nullable=False),
        Column("target", String(512), nullable=False),
        Column("detail", JSON_),
        Column("request_id", String(64)),
        Column("address", String(64)),
        PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_action", "audit", ["action"])
    op.create_index("ix_audit_actor", "audit", ["actor"])
    op.create_index("ix_audit_at_seconds", "audit", ["at_seconds"])
    op.create_index("ix_audit_target", "audit", ["target"])
    op.create_table(
        "automation_rules",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("name", String(128), nullable=False),
        Column("is_enabled", Boolean, server_default=true(), nullable=False),
        Column("event", String(64), nullable=False),
        Column("condition", JSON_, nullable=False),
        Column("actions", JSON_, nullable=False),
        Column("version", Integer, server_default="1", nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("updated_seconds", Float, nullable=False),
        PrimaryKeyConstraint("id", name="pk_automation_rules"),
        UniqueConstraint("name", name="uq_automation_rules_name"),
    )
    op.create_table(
        "checkpoint_names",
        Column("name", NAME, nullable=False),
        PrimaryKeyConstraint("name", name="pk_checkpoint_names"),
    )
    op.create_table(
        "consumers",
        Column("name", String(64), nullable=False),
        Column("event_id", BigInteger, nullable=False),
        PrimaryKeyConstraint("name", name="pk_consumers"),
    )
    op.create_table(
        "idempotency_keys",
        Column("actor", String(128), nullable=False),
        Column("key", String(128), nullable=False),
        Column("request_hash", LargeBinary(32), nullable=False),
        Column("status_code", Integer),
        Column("headers", JSON_),
        Column("body", LargeBinary),
        Column("created_seconds", Float, nullable=False),
        PrimaryKeyConstraint("actor", "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_seconds", "idempotency_keys", ["created_seconds"])
    op.create_table(
        "roots",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("name", String(64), nullable=False),
        Column("url", Text, nullable=False),
        Column("is_configured", Boolean, server_default=true(), nullable=False),
        Column("scan_state", JSON_),
        Column("scanned_seconds", Float),
        Column("scan_error", Text),
        Column("created_seconds", Float, nullable=False),
        PrimaryKeyConstraint("id", name="pk_roots"),
        UniqueConstraint("name", name="uq_roots_name"),
    )
    op.create_table(
        "schedules",
        Column("name", String(128), nullable=False),
        Column("due_seconds", Float, nullable=False),
        Column("lease_owner", String(128)),
        Column("lease_until_seconds", Float),
        PrimaryKeyConstraint("name", name="pk_schedules"),
    )
    op.create_table(
        "structures",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("digest", String(64), nullable=False),
        Column("tensor_count", Integer, nullable=False),
        Column("object_count", Integer, nullable=False),
        Column("element_count", BigInteger, nullable=False),
        Column("bytes", BigInteger, nullable=False),
        Column("dtypes", JSON_, nullable=False),
        PrimaryKeyConstraint("id", name="pk_structures"),
        UniqueConstraint("digest", name="uq_structures_digest"),
    )
    op.create_table(
        "webhooks",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("url", Text, nullable=False),
        Column("secret", Text, nullable=False),
        Column("previous_secret", Text),
        Column("previous_until_seconds", Float),
        Column("description", Text, server_default="", nullable=False),
        Column("events", JSON_, nullable=False),
        Column("roots", JSON_),
        Column("is_enabled", Boolean, server_default=true(), nullable=False),
        Column("disabled_reason", Text),
        Column("failing_since_seconds", Float),
        Column("version", Integer, server_default="1", nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("updated_seconds", Float, nullable=False),
        PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_table(
        "retention_policies",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("name", String(128), nullable=False),
        Column("is_enabled", Boolean, server_default=true(), nullable=False),
        Column("root_id", ID, nullable=False),
        Column("run_glob", Text, nullable=False),
        Column("keep", JSON_, nullable=False),
        Column("grace_seconds", Float, nullable=False),
        Column("interval_seconds", Float, nullable=False),
        Column("version", Integer, server_default="1", nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("updated_seconds", Float, nullable=False),
        ForeignKeyConstraint(["root_id"], ["roots.id"], name="fk_retention_policies_root_id"),
        PrimaryKeyConstraint("id", name="pk_retention_policies"),
        UniqueConstraint("name", name="uq_retention_policies_name"),
    )
    op.create_table(
        "runs",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("root_id", ID, nullable=False),
        Column("key", NAME, nullable=False),
        Column("checkpoint_count", Integer, server_default="0", nullable=False),
        Column("latest_step", BigInteger),
        Column("latest_seconds", Float),
        Column("latest_order", Float, Computed("coalesce(latest_seconds, -1)", persisted=True)),
        Column("bytes", BigInteger, server_default="0", nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("updated_seconds", Float, nullable=False),
        ForeignKeyConstraint(["root_id"], ["roots.id"], name="fk_runs_root_id"),
        PrimaryKeyConstraint("id", name="pk_runs"),
        UniqueConstraint("root_id", "key", name="uq_runs_root_id_key"),
    )
    op.create_index("ix_runs_key_id", "runs", ["key", "id"])
    op.create_index("ix_runs_latest_order_id", "runs", ["latest_order", "id"])
    op.create_table(
        "structure_dtypes",
        Column("structure_id", ID, nullable=False),
        Column("dtype", String(32), nullable=False),
        ForeignKeyConstraint(["structure_id"], ["structures.id"], name="fk_structure_dtypes_structure_id"),
        PrimaryKeyConstraint("structure_id", "dtype", name="pk_structure_dtypes"),
    )
    op.create_index("ix_structure_dtypes_dtype_structure_id", "structure_dtypes", ["dtype", "structure_id"])
    op.create_table(
        "structure_tensors",
        Column("structure_id", ID, nullable=False),
        Column("position", Integer, nullable=False),
        Column("fqn", NAME, nullable=False),
        Column("kind", String(8), nullable=False),
        Column("dtype", String(32)),
        Column("shape", JSON_),
        Column("bytes", BigInteger, nullable=False),
        ForeignKeyConstraint(["structure_id"], ["structures.id"], name="fk_structure_tensors_structure_id"),
        PrimaryKeyConstraint("structure_id", "position", name="pk_structure_tensors"),
    )
    op.create_index("ix_structure_tensors_fqn_structure_id", "structure_tensors", ["fqn", "structure_id"])
    op.create_table(
        "checkpoints",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("root_id", ID, nullable=False),
        Column("run_id", ID, nullable=False),
        Column("key", NAME, nullable=False),
        Column("name", NAME, nullable=False),
        Column("step", BigInteger),
        Column("step_order", BigInteger, Computed("coalesce(step, -1)", persisted=True)),
        Column("format", String(16), nullable=False),
        Column("state", String(16), nullable=False),
        Column("save_id", String(64)),
        Column("fingerprint", String(64)),
        Column("committed_seconds", Float, nullable=False),
        Column("observed_seconds", Float, server_default="0", nullable=False),
        Column("announced", String(64)),
        Column("discovered_seconds", Float, nullable=False),
        Column("updated_seconds", Float, nullable=False),
        Column("deleted_seconds", Float),
        Column("purge_after_seconds", Float),
        Column("bytes", BigInteger, server_default="0", nullable=False),
        Column("file_count", Integer, server_default="0", nullable=False),
        Column("world_size", Integer),
        Column("structure_id", ID),
        Column("verification", String(16), server_default="unverified", nullable=False),
        Column("verified_seconds", Float),
        Column("problem", Text),
        Column("is_pinned", Boolean, server_default=false(), nullable=False),
        Column("user_metadata", JSON_),
        Column("provenance", JSON_),
        Column("version", Integer, server_default="1", nullable=False),
        CheckConstraint(
            "state IN ('incomplete', 'committed', 'unreadable', 'vanished', 'deleted', 'purged')",
            name=op.f("ck_checkpoints_state"),
        ),
        CheckConstraint(
            "verification IN ('unverified', 'good', 'damaged')", name=op.f("ck_checkpoints_verification")
        ),
        ForeignKeyConstraint(["root_id"], ["roots.id"], name="fk_checkpoints_root_id"),
        ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_checkpoints_run_id"),
        ForeignKeyConstraint(["structure_id"], ["structures.id"], name="fk_checkpoints_structure_id"),
        PrimaryKeyConstraint("id", name="pk_checkpoints"),
        UniqueConstraint("root_id", "key", name="uq_checkpoints_root_id_key"),
    )
    op.create_index("ix_checkpoints_bytes_id", "checkpoints", ["bytes", "id"])
    op.create_index("ix_checkpoints_committed_seconds_id", "checkpoints", ["committed_seconds", "id"])
    op.create_index(
        "ix_checkpoints_format_committed_seconds_id", "checkpoints", ["format", "committed_seconds", "id"]
    )
    op.create_index(
        "ix_checkpoints_is_pinned_committed_seconds_id",
        "checkpoints",
        ["is_pinned", "committed_seconds", "id"],
    )
    op.create_index("ix_checkpoints_name_id", "checkpoints", ["name", "id"])
    op.create_index(
        "ix_checkpoints_root_id_committed_seconds_id", "checkpoints", ["root_id", "committed_seconds", "id"]
    )
    op.create_index(
        "ix_checkpoints_run_id_committed_seconds_id", "checkpoints", ["run_id", "committed_seconds", "id"]
    )
    op.create_index("ix_checkpoints_run_id_step_order_id", "checkpoints", ["run_id", "step_order", "id"])
    op.create_index(
        "ix_checkpoints_state_committed_seconds_id", "checkpoints", ["state", "committed_seconds", "id"]
    )
    op.create_index("ix_checkpoints_step_order_id", "checkpoints", ["step_order", "id"])
    op.create_index("ix_checkpoints_structure_id_id", "checkpoints", ["structure_id", "id"])
    op.create_index(
        "ix_checkpoints_verification_committed_seconds_id",
        "checkpoints",
        ["verification", "committed_seconds", "id"],
    )
    op.create_table(
        "aliases",
        Column("run_id", ID, nullable=False),
        Column("name", String(128), nullable=False),
        Column("checkpoint_id", ID, nullable=False),
        Column("is_protected", Boolean, server_default=false(), nullable=False),
        Column("version", Integer, server_default="1", nullable=False),
        Column("updated_seconds", Float, nullable=False),
        Column("updated_by", String(128)),
        ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_aliases_checkpoint_id"),
        ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_aliases_run_id"),
        PrimaryKeyConstraint("run_id", "name", name="pk_aliases"),
    )
    op.create_index("ix_aliases_checkpoint_id", "aliases", ["checkpoint_id"])
    op.create_index("ix_aliases_name_checkpoint_id", "aliases", ["name", "checkpoint_id"])
    op.create_table(
        "checkpoint_metrics",
        Column("checkpoint_id", ID, nullable=False),
        Column("name", String(128), nullable=False),
        Column("value", Float, nullable=False),
        ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_metrics_checkpoint_id"
        ),
        PrimaryKeyConstraint("checkpoint_id", "name", name="pk_checkpoint_metrics"),
    )
    op.create_index(
        "ix_checkpoint_metrics_name_value_checkpoint_id",
        "checkpoint_metrics",
        ["name", "value", "checkpoint_id"],
    )
    op.create_table(
        "checkpoint_tags",
        Column("checkpoint_id", ID, nullable=False),
        Column("tag", String(128), nullable=False),
        Column("created_seconds", Float, nullable=False),
        ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_tags_checkpoint_id"),
        PrimaryKeyConstraint("checkpoint_id", "tag", name="pk_checkpoint_tags"),
    )
    op.create_index("ix_checkpoint_tags_tag_checkpoint_id", "checkpoint_tags", ["tag", "checkpoint_id"])
    op.create_table(
        "events",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("kind", String(64), nullable=False),
        Column("root_id", ID),
        Column("checkpoint_id", ID),
        Column("data", JSON_, nullable=False),
        Column("at_seconds", Float, nullable=False),
        ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_events_checkpoint_id"),
        ForeignKeyConstraint(["root_id"], ["roots.id"], name="fk_events_root_id"),
        PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_checkpoint_id_id", "events", ["checkpoint_id", "id"])
    op.create_table(
        "jobs",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("kind", String(32), nullable=False),
        Column("state", String(16), nullable=False),
        Column("priority", Integer, server_default="0", nullable=False),
        Column("params", JSON_, nullable=False),
        Column("root_id", ID),
        Column("checkpoint_id", ID),
        Column("created_by", String(128), nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("started_seconds", Float),
        Column("finished_seconds", Float),
        Column("not_before_seconds", Float, server_default="0", nullable=False),
        Column("attempt", Integer, server_default="0", nullable=False),
        Column("max_attempts", Integer, server_default="3", nullable=False),
        Column("lease_owner", String(128)),
        Column("lease_until_seconds", Float),
        Column("fence", BigInteger, server_default="0", nullable=False),
        Column("cancel_seconds", Float),
        Column("plan", JSON_),
        Column("progress", JSON_),
        Column("result", JSON_),
        Column("error", JSON_),
        Column("dedup_key", String(128)),
        CheckConstraint(
            "state IN ('queued', 'planning', 'running', 'publishing', 'succeeded', 'failed', 'cancelled')",
            name=op.f("ck_jobs_state"),
        ),
        ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_jobs_checkpoint_id"),
        ForeignKeyConstraint(["root_id"], ["roots.id"], name="fk_jobs_root_id"),
        PrimaryKeyConstraint("id", name="pk_jobs"),
        UniqueConstraint("dedup_key", name="uq_jobs_dedup_key"),
    )
    op.create_index("ix_jobs_checkpoint_id", "jobs", ["checkpoint_id"])
    op.create_index("ix_jobs_finished_seconds", "jobs", ["finished_seconds"])
    op.create_index("ix_jobs_kind_state", "jobs", ["kind", "state"])
    op.create_index("ix_jobs_state_priority_id", "jobs", ["state", "priority", "id"])
    op.create_table(
        "checkpoint_statistics",
        Column("checkpoint_id", ID, nullable=False),
        Column("fingerprint", String(64), nullable=False),
        Column("result", JSON_, nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("job_id", ID),
        ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_checkpoint_statistics_checkpoint_id"
        ),
        ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoint_statistics_job_id"),
        PrimaryKeyConstraint("checkpoint_id", name="pk_checkpoint_statistics"),
    )
    op.create_table(
        "job_events",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("job_id", ID, nullable=False),
        Column("kind", String(32), nullable=False),
        Column("data", JSON_, nullable=False),
        Column("at_seconds", Float, nullable=False),
        ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id"),
        PrimaryKeyConstraint("id", name="pk_job_events"),
    )
    op.create_index("ix_job_events_job_id_id", "job_events", ["job_id", "id"])
    op.create_table(
        "lineage",
        Column("child_id", ID, nullable=False),
        Column("parent_id", ID, nullable=False),
        Column("kind", String(32), nullable=False),
        Column("job_id", ID),
        Column("created_seconds", Float, nullable=False),
        ForeignKeyConstraint(["child_id"], ["checkpoints.id"], name="fk_lineage_child_id"),
        ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_lineage_job_id"),
        ForeignKeyConstraint(["parent_id"], ["checkpoints.id"], name="fk_lineage_parent_id"),
        PrimaryKeyConstraint("child_id", "parent_id", "kind", name="pk_lineage"),
    )
    op.create_index("ix_lineage_parent_id", "lineage", ["parent_id"])
    op.create_table(
        "tasks",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("job_id", ID, nullable=False),
        Column("number", Integer, nullable=False),
        Column("state", String(16), nullable=False),
        Column("payload", JSON_, nullable=False),
        Column("weight_bytes", BigInteger, server_default="0", nullable=False),
        Column("done_bytes", BigInteger, server_default="0", nullable=False),
        Column("not_before_seconds", Float, server_default="0", nullable=False),
        Column("attempt", Integer, server_default="0", nullable=False),
        Column("lease_owner", String(128)),
        Column("lease_until_seconds", Float),
        Column("fence", BigInteger, server_default="0", nullable=False),
        Column("result", JSON_),
        Column("error", JSON_),
        CheckConstraint(
            "state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name=op.f("ck_tasks_state")
        ),
        ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_tasks_job_id"),
        PrimaryKeyConstraint("id", name="pk_tasks"),
        UniqueConstraint("job_id", "number", name="uq_tasks_job_id_number"),
    )
    op.create_index("ix_tasks_state_job_id", "tasks", ["state", "job_id"])
    op.create_table(
        "verifications",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("checkpoint_id", ID, nullable=False),
        Column("fingerprint", String(64)),
        Column("mode", String(16), nullable=False),
        Column("outcome", String(16), nullable=False),
        Column("findings", JSON_, nullable=False),
        Column("checked_bytes", BigInteger, nullable=False),
        Column("seconds", Float, nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("job_id", ID),
        ForeignKeyConstraint(["checkpoint_id"], ["checkpoints.id"], name="fk_verifications_checkpoint_id"),
        ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_verifications_job_id"),
        PrimaryKeyConstraint("id", name="pk_verifications"),
    )
    op.create_index("ix_verifications_checkpoint_id", "verifications", ["checkpoint_id"])
    op.create_table(
        "webhook_deliveries",
        Column("id", ID, autoincrement=True, nullable=False),
        Column("webhook_id", ID, nullable=False),
        Column("event_id", ID, nullable=False),
        Column("state", String(16), nullable=False),
        Column("attempt", Integer, server_default="0", nullable=False),
        Column("created_seconds", Float, nullable=False),
        Column("due_seconds", Float, nullable=False),
        Column("status_code", Integer),
        Column("error", Text),
        Column("delivered_seconds", Float),
        ForeignKeyConstraint(["event_id"], ["events.id"], name="fk_webhook_deliveries_event_id"),
        ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_webhook_deliveries_webhook_id"),
        PrimaryKeyConstraint("id", name="pk_webhook_deliveries"),
        UniqueConstraint("webhook_id", "event_id", name="uq_webhook_deliveries_webhook_id_event_id"),
    )
    op.create_index("ix_webhook_deliveries_state_due_seconds", "webhook_deliveries", ["state", "due_seconds"])
