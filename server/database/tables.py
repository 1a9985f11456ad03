"""Tables of the catalog and of the job ledger, equal on SQLite and PostgreSQL.

Times are float seconds since the epoch in UTC; sizes are bytes. Referenced rows are never deleted; a state
marks removed objects. The records (`dcp.server.records`) declare the columns of checkpoints and runs. A
change of columns needs a migration (`dcp.server.database.migrations`); a test compares both.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)

from dcp.server.database.mapping import ID, JSON_DOCUMENT, NAME, checks_of, columns_of
from dcp.server.records.checkpoints import CheckpointDetail, Run

COUNTED: Final = "ix_checkpoints_counted"
"""Index for counting checkpoints."""

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _id() -> Column[int]:
    return Column("id", ID, primary_key=True, autoincrement=True)


def _ref(name: str, target: str, **options: Any) -> Column[int]:
    return Column(name, ID, ForeignKey(target), **options)


def resource_table(name: str, *columns: Any) -> Table:
    """Declare a table of user-created objects with an id, a version and timestamps, for
    `dcp.server.core.resource`."""
    times = [Column(f"{each}_seconds", Float, nullable=False) for each in ("created", "updated")]
    version = Column("version", Integer, nullable=False, server_default="1")
    return Table(name, metadata, _id(), version, *times, *columns)


def _document() -> Column[int]:
    # No foreign key: SQLite cannot add one to an existing table. Only unreferenced documents are removed.
    return Column("document_id", ID, index=True)


# -- the catalog --------------------------------------------------------------------------------------------

roots: Final = Table(
    "roots",
    metadata,
    _id(),
    Column("name", String(64), nullable=False, unique=True),
    Column("url", Text, nullable=False),
    Column("is_configured", Boolean, nullable=False, server_default=true()),
    Column("scan_state", JSON_DOCUMENT),  # state for detecting changes
    Column("scanned_seconds", Float),
    Column("scan_error", Text),
    Column("created_seconds", Float, nullable=False),
)
"""Configured storage. Roots removed from the configuration keep their rows."""

runs: Final = Table(
    "runs",
    metadata,
    *columns_of(Run),
    _ref("root_id", "roots.id", nullable=False),
    Column("latest_order", Float, Computed("coalesce(latest_seconds, -1)", persisted=True)),
    UniqueConstraint("root_id", "key"),
    Index(None, "latest_order", "id"),
    Index(None, "key", "id"),
)

structures: Final = Table(
    "structures",
    metadata,
    _id(),
    Column("digest", String(64), nullable=False, unique=True),
    Column("tensor_count", Integer, nullable=False),
    Column("object_count", Integer, nullable=False),
    Column("element_count", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("dtypes", JSON_DOCUMENT, nullable=False),  # {"bfloat16": bytes, ...}
)
"""Names, shapes and dtypes, shared by the steps of a run."""

structure_tensors: Final = Table(
    "structure_tensors",
    metadata,
    _ref("structure_id", "structures.id", primary_key=True),
    Column("position", Integer, primary_key=True),  # in the order of names
    Column("fqn", NAME, nullable=False),
    Column("kind", String(8), nullable=False),  # "tensor" or "object"
    Column("dtype", String(32)),
    Column("shape", JSON_DOCUMENT),
    Column("bytes", BigInteger, nullable=False),
    Index(None, "fqn", "structure_id"),
)

structure_dtypes: Final = Table(
    "structure_dtypes",
    metadata,
    _ref("structure_id", "structures.id", primary_key=True),
    Column("dtype", String(32), primary_key=True),
    Index(None, "dtype", "structure_id"),
)

structure_patterns: Final = Table(
    "structure_patterns",
    metadata,
    _ref("structure_id", "structures.id", primary_key=True),
    Column("pattern", NAME, primary_key=True),
    Column("position", Integer, nullable=False),  # position of the first match
    Column("tensor_count", Integer, nullable=False),
    Index(None, "pattern", "structure_id"),
)
"""Lower-case names with "#" for each number: a search tests one pattern for all layers."""

tensor_patterns: Final = Table(
    "tensor_patterns",
    metadata,
    Column("pattern", NAME, primary_key=True),
)
"""All patterns, without duplicates."""

checkpoints: Final = Table(
    "checkpoints",
    metadata,
    *columns_of(CheckpointDetail),
    _ref("root_id", "roots.id", nullable=False),
    Column("step_order", BigInteger, Computed("coalesce(step, -1)", persisted=True)),  # no step sorts first
    Column("observed_seconds", Float, nullable=False, server_default="0"),  # time of the observation
    Column("announced", String(64)),  # save id or fingerprint of the committed content
    UniqueConstraint("root_id", "key"),
    # One index per order, and per frequent filter by time: pages are read from an index without
    # sorting. `dcp.server.catalog.listing` chooses the index.
    Index(None, "committed_seconds", "id"),
    Index(None, "step_order", "id"),
    Index(None, "bytes", "id"),
    Index(None, "name", "id"),
    Index(None, "run_id", "step_order", "id"),
    Index(None, "run_id", "committed_seconds", "id"),
    Index(None, "root_id", "committed_seconds", "id"),
    Index(None, "state", "committed_seconds", "id"),
    Index(None, "format", "committed_seconds", "id"),
    Index(None, "verification", "committed_seconds", "id"),
    Index(None, "is_pinned", "committed_seconds", "id"),
    Index(None, "registered_by", "committed_seconds", "id"),
    Index(None, "structure_id", "id"),
    Index(  # covers the facet counts of lists
        COUNTED,
        "state",
        "verification",
        "format",
        "is_pinned",
        "root_id",
        "run_id",
        "structure_id",
    ),
    Index(None, "save_id"),  # finds the source of a resumed checkpoint
    Index(None, "resumed_from"),
    Index(None, "content_digest"),  # finds equal tensors
    *checks_of(CheckpointDetail),
)
"""`CheckpointDetail` declares the visible columns; the others are here."""

kept: Final = Table(
    "kept",
    metadata,
    _ref("root_id", "roots.id", primary_key=True),
    Column("owner", String(192), primary_key=True),  # "": no account
    Column("checkpoint_count", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index(None, "owner"),
)
"""Bytes of committed checkpoints, by root and by registering account."""

checkpoint_names: Final = Table(
    "checkpoint_names",
    metadata,
    Column("name", NAME, primary_key=True),
)
"""Current and former names of checkpoints, without duplicates, for the search."""

tags: Final = Table(
    "checkpoint_tags",
    metadata,
    _ref("checkpoint_id", "checkpoints.id", primary_key=True),
    Column("tag", String(128), primary_key=True),
    Column("created_seconds", Float, nullable=False),
    Index(None, "tag", "checkpoint_id"),
)

aliases: Final = Table(
    "aliases",
    metadata,
    _ref("run_id", "runs.id", primary_key=True),
    Column("name", String(128), primary_key=True),
    _ref("checkpoint_id", "checkpoints.id", nullable=False, index=True),
    Column("is_protected", Boolean, nullable=False, server_default=false()),
    Column("version", Integer, nullable=False, server_default="1"),
    Column("updated_seconds", Float, nullable=False),
    Column("updated_by", String(128)),
    Index(None, "name", "checkpoint_id"),
)
"""Movable names such as "best" within a run; protected aliases need a scope."""

metrics: Final = Table(
    "checkpoint_metrics",
    metadata,
    _ref("checkpoint_id", "checkpoints.id", primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("value", Float, nullable=False),
    Index(None, "name", "value", "checkpoint_id"),
)

lineage: Final = Table(
    "lineage",
    metadata,
    _ref("child_id", "checkpoints.id", primary_key=True),
    _ref("parent_id", "checkpoints.id", primary_key=True),
    Column("kind", String(32), primary_key=True),  # a `LineageKind`; resumed checkpoints have `resumed_from`
    _ref("job_id", "jobs.id"),
    Column("created_seconds", Float, nullable=False),
    Column("map", String(256)),  # weight map of the conversion
    Index(None, "parent_id"),
)

verifications: Final = Table(
    "verifications",
    metadata,
    _id(),
    _ref("checkpoint_id", "checkpoints.id", nullable=False, index=True),
    Column("fingerprint", String(64)),  # fingerprint of the verified content
    Column("mode", String(16), nullable=False),
    Column("outcome", String(16), nullable=False),  # "good" or "damaged"
    Column("findings", JSON_DOCUMENT, nullable=False),
    Column("checked_bytes", BigInteger, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created_seconds", Float, nullable=False),
    _ref("job_id", "jobs.id"),
)

statistics: Final = Table(
    "checkpoint_statistics",
    metadata,
    _ref("checkpoint_id", "checkpoints.id", primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("result", JSON_DOCUMENT, nullable=False),
    Column("created_seconds", Float, nullable=False),
    _ref("job_id", "jobs.id"),
    _document(),  # with the list ``tensors``
)

audit: Final = Table(
    "audit",
    metadata,
    _id(),
    Column("at_seconds", Float, nullable=False, index=True),
    Column("actor", String(128), nullable=False, index=True),  # "key:NAME", "trainer:...", "system"
    Column("action", String(64), nullable=False, index=True),
    Column("target", String(512), nullable=False, index=True),
    Column("detail", JSON_DOCUMENT),
    Column("request_id", String(64)),
    Column("address", String(64)),
    Column("root", String(63)),  # root of the target, for its admins; NULL: none or several
    Column("other_roots", JSON_DOCUMENT),  # further roots named in the detail
    Index(None, "root", "id"),
)

# -- events and jobs -----------------------------------------------------------------------------------------

events: Final = Table(
    "events",
    metadata,
    _id(),
    Column("kind", String(64), nullable=False),
    _ref("root_id", "roots.id"),
    _ref("checkpoint_id", "checkpoints.id"),
    Column("data", JSON_DOCUMENT, nullable=False),
    Column("at_seconds", Float, nullable=False),
    Index(None, "checkpoint_id", "id"),
)
"""Events of catalog and features, written in the transaction of the change."""

consumers: Final = Table(
    "consumers",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("event_id", BigInteger, nullable=False),  # last handled event
)

schedules: Final = Table(
    "schedules",
    metadata,
    Column("name", String(128), primary_key=True),  # "scan:ROOT", "retention:ID", "consume", ...
    Column("due_seconds", Float, nullable=False),
    Column("lease_owner", String(128)),
    Column("lease_until_seconds", Float),
)
"""Periodic work, run by one process at a time."""

workers: Final = Table(
    "workers",
    metadata,
    Column("owner", String(128), primary_key=True),
    Column("kinds", JSON_DOCUMENT, nullable=False),  # kinds of jobs that the worker runs
    Column("seen_seconds", Float, nullable=False),
)
"""Workers that run or ran recently."""

jobs: Final = Table(
    "jobs",
    metadata,
    _id(),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),  # higher runs first
    Column("params", JSON_DOCUMENT, nullable=False),
    _ref("root_id", "roots.id"),
    _ref("checkpoint_id", "checkpoints.id", index=True),
    Column("created_by", String(128), nullable=False),
    Column("owner", String(192), nullable=False),  # account for limits and turns
    Column("key_id", ID),
    Column("created_seconds", Float, nullable=False),
    Column("started_seconds", Float),
    Column("finished_seconds", Float),
    Column("not_before_seconds", Float, nullable=False, server_default="0"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("max_attempts", Integer, nullable=False, server_default="3"),
    Column("lease_owner", String(128)),
    Column("lease_until_seconds", Float),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("is_ending", Boolean, nullable=False, server_default=false()),  # cancelled or failed: stops
    Column("cancel_requested_seconds", Float),
    Column("plan", JSON_DOCUMENT),  # data from planning for publishing
    Column("progress", JSON_DOCUMENT),
    Column("result", JSON_DOCUMENT),
    _document(),  # large result; ``result`` has the short members
    Column("error", JSON_DOCUMENT),
    Column("waiting", JSON_DOCUMENT),  # last failure and time of the next attempt
    Column("dedup_key", String(128)),  # unique among unfinished jobs
    Column("result_key", String(128)),  # equal for jobs whose results replace each other
    Column("turn", BigInteger, nullable=False, server_default="0"),  # lower runs first within a priority
    Index(None, "state", "priority", "turn", "id"),
    Index(None, "owner", "state", "turn"),
    Index(None, "key_id", "state"),
    Index(None, "root_id", "state"),
    Index(None, "kind", "state"),
    Index(None, "finished_seconds"),
    Index(None, "result_key", "id"),
    Index(
        "uq_jobs_unfinished",
        "dedup_key",
        unique=True,
        sqlite_where=text("finished_seconds IS NULL"),
        postgresql_where=text("finished_seconds IS NULL"),
    ),
    CheckConstraint(
        "state IN ('queued', 'planning', 'running', 'publishing', 'succeeded', 'failed', 'cancelled')",
        name="state",
    ),
)

job_roots: Final = Table(
    "job_roots",
    metadata,
    Column("job_id", ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    _ref("root_id", "roots.id", primary_key=True),
)
"""Further roots of a job: the job is visible only to callers that see all of its roots."""

tasks: Final = Table(
    "tasks",
    metadata,
    _id(),
    _ref("job_id", "jobs.id", nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("payload", JSON_DOCUMENT, nullable=False),
    Column("weight_bytes", BigInteger, nullable=False, server_default="0"),
    Column("done_bytes", BigInteger, nullable=False, server_default="0"),
    Column("not_before_seconds", Float, nullable=False, server_default="0"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("lease_owner", String(128)),
    Column("lease_until_seconds", Float),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("result", JSON_DOCUMENT),
    _document(),  # holds a large result
    Column("error", JSON_DOCUMENT),
    UniqueConstraint("job_id", "number"),
    Index(None, "state", "job_id"),
    CheckConstraint("state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="state"),
)

job_events: Final = Table(
    "job_events",
    metadata,
    _id(),
    _ref("job_id", "jobs.id", nullable=False),
    Column("kind", String(32), nullable=False),
    Column("data", JSON_DOCUMENT, nullable=False),
    Column("at_seconds", Float, nullable=False),
    Index(None, "job_id", "id"),
)

documents: Final = Table(
    "documents",
    metadata,
    _id(),
    Column("name", String(64), unique=True),  # name of a draft; NULL once referenced
    Column("head", JSON_DOCUMENT, nullable=False),  # members without parts; members in parts are empty
)
"""Results too large for the rows of lists."""

document_parts: Final = Table(
    "document_parts",
    metadata,
    _ref("document_id", "documents.id", primary_key=True),
    Column("field", NAME, primary_key=True),
    Column("position", Integer, primary_key=True),  # index of the first item
    Column("content", JSON_DOCUMENT, nullable=False),
)
"""Lists and long texts of ``documents``, several items per row."""

# -- accounts and keys ---------------------------------------------------------------------------------------

accounts: Final = resource_table(
    "accounts",
    Column("kind", String(16), nullable=False),  # "person", "service"
    Column("name", String(64), nullable=False),
    Column("title", String(256), nullable=False, server_default=""),
    Column("issuer", String(512)),  # identifies a person together with the subject
    Column("subject", String(255)),
    Column("email", String(320)),  # verified addresses only
    Column("groups", JSON_DOCUMENT, nullable=False),  # as of the last sign-in
    Column("seen_seconds", Float),
    Column("disabled_seconds", Float),
    UniqueConstraint("kind", "name"),
    UniqueConstraint("issuer", "subject"),
)
"""People who sign in, and service accounts."""

grants: Final = resource_table(
    "grants",
    _ref("account_id", "accounts.id", index=True),
    Column("group_name", String(256), index=True),  # either of both
    Column("grantee", String(300), nullable=False),  # account or group: NULLs are never equal
    Column("role", String(16), nullable=False),
    Column("root", String(63), nullable=False),  # "*": all
    Column("created_by", String(128), nullable=False),
    UniqueConstraint("grantee", "root"),
)
"""Roles of accounts and of groups, by root."""

api_keys: Final = Table(
    "api_keys",
    metadata,
    _id(),
    Column("name", String(128), nullable=False),
    Column("prefix", String(16), nullable=False, unique=True),  # shown to identify the key
    Column("hash", LargeBinary(32), nullable=False),  # SHA-256 of a key of 256 random bits
    Column("scopes", JSON_DOCUMENT, nullable=False),
    Column("roots", JSON_DOCUMENT),  # names; none: all
    Column("created_seconds", Float, nullable=False),
    Column("expires_seconds", Float),
    Column("revoked_seconds", Float),
    Column("used_seconds", Float),
    _ref("account_id", "accounts.id", index=True),  # owner; NULL: an independent key
    Column("maker", String(256)),  # `Principal.maker`; none: made by the command line
)

sessions: Final = Table(
    "sessions",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),  # SHA-256 of the cookie value
    Column("key_id", ID, ForeignKey("api_keys.id")),  # either of both
    Column("account_id", ID, ForeignKey("accounts.id"), index=True),
    Column("created_seconds", Float, nullable=False),
    Column("expires_seconds", Float, nullable=False, index=True),
)
"""Browser sessions of keys and people, with the same rights and lifetime."""

idempotency: Final = Table(
    "idempotency_keys",
    metadata,
    Column("actor", String(128), primary_key=True),
    Column("key", String(128), primary_key=True),
    Column("request_hash", LargeBinary(32), nullable=False),
    Column("status_code", Integer),
    Column("headers", JSON_DOCUMENT),
    Column("body", LargeBinary),
    Column("created_seconds", Float, nullable=False, index=True),
)
