"""The tables of the catalog and of the ledger of jobs; the same on SQLite and PostgreSQL.

Times are seconds since the epoch, UTC, as floating point. Sizes are bytes. Rows are never deleted where
other rows refer to them; what is gone has a state. The columns of checkpoints and runs are those that the
records declare (`dcp.server.records`). A change here or there needs a migration
(`dcp.server.database.migrations`), and a test compares both.
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
"""The index by which checkpoints are counted."""

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
    """Declare a table of what people create and change: with an id, a version, and the times of both, which
    `dcp.server.core.resource` needs."""
    times = [Column(f"{each}_seconds", Float, nullable=False) for each in ("created", "updated")]
    version = Column("version", Integer, nullable=False, server_default="1")
    return Table(name, metadata, _id(), version, *times, *columns)


def _document() -> Column[int]:
    # No foreign key: SQLite adds none to a table that is there. Only what nothing refers to is removed.
    return Column("document_id", ID, index=True)


# -- the catalog --------------------------------------------------------------------------------------------

roots: Final = Table(
    "roots",
    metadata,
    _id(),
    Column("name", String(64), nullable=False, unique=True),
    Column("url", Text, nullable=False),
    Column("is_configured", Boolean, nullable=False, server_default=true()),
    Column("scan_state", JSON_DOCUMENT),  # what the scanner needs to tell what changed
    Column("scanned_seconds", Float),
    Column("scan_error", Text),
    Column("created_seconds", Float, nullable=False),
)
"""Storage from the configuration that the service may touch. One no longer configured keeps its rows."""

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
"""Names, shapes and dtypes, once for all steps of a run that share them."""

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
    Column("position", Integer, nullable=False),  # of the first tensor that has it
    Column("tensor_count", Integer, nullable=False),
    Index(None, "pattern", "structure_id"),
)
"""Names in small letters, with "#" for each number: layers of a model differ by numbers only, so that a
search looks at few."""

tensor_patterns: Final = Table(
    "tensor_patterns",
    metadata,
    Column("pattern", NAME, primary_key=True),
)
"""All of them, each once."""

checkpoints: Final = Table(
    "checkpoints",
    metadata,
    *columns_of(CheckpointDetail),
    _ref("root_id", "roots.id", nullable=False),
    Column("step_order", BigInteger, Computed("coalesce(step, -1)", persisted=True)),  # none sorts first
    Column("observed_seconds", Float, nullable=False, server_default="0"),  # when it was as it says here
    Column("announced", String(64)),  # the committed content: its save id, or else its fingerprint
    UniqueConstraint("root_id", "key"),
    # One for each order, and by time within frequent filters: a page is read from an index, without
    # sorting and without reading on. `dcp.server.catalog.listing` says which one.
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
    Index(  # the counts beside lists are made of it alone, without the rows
        COUNTED,
        "state",
        "verification",
        "format",
        "is_pinned",
        "root_id",
        "run_id",
        "structure_id",
    ),
    Index(None, "save_id"),  # by which a checkpoint is found that another was resumed from
    Index(None, "resumed_from"),
    Index(None, "content_digest"),  # who has the same tensors
    *checks_of(CheckpointDetail),
)
"""The columns that are shown are declared by `CheckpointDetail`; the others here."""

kept: Final = Table(
    "kept",
    metadata,
    _ref("root_id", "roots.id", primary_key=True),
    Column("owner", String(192), primary_key=True),  # "": no account registered them
    Column("checkpoint_count", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index(None, "owner"),
)
"""Sums of committed checkpoints, by root and by the account that registered them."""

checkpoint_names: Final = Table(
    "checkpoint_names",
    metadata,
    Column("name", NAME, primary_key=True),
)
"""The names that checkpoints have or had, each once: runs share most, so that a search looks at few."""

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
"""Names such as "best" that move from checkpoint to checkpoint of a run; protected ones need a scope."""

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
    Column("kind", String(32), primary_key=True),  # a `LineageKind`; resumed checkpoints say so themselves
    _ref("job_id", "jobs.id"),
    Column("created_seconds", Float, nullable=False),
    Column("map", String(256)),  # the weight map that it was made through
    Index(None, "parent_id"),
)

verifications: Final = Table(
    "verifications",
    metadata,
    _id(),
    _ref("checkpoint_id", "checkpoints.id", nullable=False, index=True),
    Column("fingerprint", String(64)),  # of what was verified
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
    _document(),  # has the list ``tensors``
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
    Column("root", String(63)),  # in which it was, for its own admins; none: in none, or in several
    Column("other_roots", JSON_DOCUMENT),  # names of those that the detail concerns as well
    Index(None, "root", "id"),
)

# -- what happens --------------------------------------------------------------------------------------------

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
"""Events, written in the transaction of the change: of the catalog and of features."""

consumers: Final = Table(
    "consumers",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("event_id", BigInteger, nullable=False),  # the last one that has been dealt with
)

schedules: Final = Table(
    "schedules",
    metadata,
    Column("name", String(128), primary_key=True),  # "scan:ROOT", "retention:ID", "consume", ...
    Column("due_seconds", Float, nullable=False),
    Column("lease_owner", String(128)),
    Column("lease_until_seconds", Float),
)
"""Periodic work that one process does at a time."""

workers: Final = Table(
    "workers",
    metadata,
    Column("owner", String(128), primary_key=True),
    Column("kinds", JSON_DOCUMENT, nullable=False),  # of jobs, that it does
    Column("seen_seconds", Float, nullable=False),
)
"""Workers that run, or ran a moment ago."""

jobs: Final = Table(
    "jobs",
    metadata,
    _id(),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False, server_default="0"),  # the higher the sooner
    Column("params", JSON_DOCUMENT, nullable=False),
    _ref("root_id", "roots.id"),
    _ref("checkpoint_id", "checkpoints.id", index=True),
    Column("created_by", String(128), nullable=False),
    Column("owner", String(192), nullable=False),  # the account that limits and turns count it for
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
    Column("plan", JSON_DOCUMENT),  # what publishing needs, found out while planning
    Column("progress", JSON_DOCUMENT),
    Column("result", JSON_DOCUMENT),
    _document(),  # of a large result; ``result`` is what is short of it
    Column("error", JSON_DOCUMENT),
    Column("waiting", JSON_DOCUMENT),  # why the last attempt failed, and when the next one is
    Column("dedup_key", String(128)),  # at most one unfinished job has it
    Column("result_key", String(128)),  # the same for jobs whose results replace each other
    Column("turn", BigInteger, nullable=False, server_default="0"),  # the lower the sooner, in one priority
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
"""Roots of the checkpoints that a job names, except its own: the job is visible with all of them only."""

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
    _document(),  # in place of a large result
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
    Column("name", String(64), unique=True),  # of a draft; none of one that is referred to
    Column("head", JSON_DOCUMENT, nullable=False),  # what is in no part, and what is, empty
)
"""Results that are too large for rows which lists read."""

document_parts: Final = Table(
    "document_parts",
    metadata,
    _ref("document_id", "documents.id", primary_key=True),
    Column("field", NAME, primary_key=True),
    Column("position", Integer, primary_key=True),  # of the first of its items among all
    Column("content", JSON_DOCUMENT, nullable=False),
)
"""Lists and long texts of ``documents``, some of it in a row."""

# -- who may -------------------------------------------------------------------------------------------------

accounts: Final = resource_table(
    "accounts",
    Column("kind", String(16), nullable=False),  # "person", "service"
    Column("name", String(64), nullable=False),
    Column("title", String(256), nullable=False, server_default=""),
    Column("issuer", String(512)),  # with the subject, of a person: as its provider calls it
    Column("subject", String(255)),
    Column("email", String(320)),  # only if the provider has verified it
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
    Column("grantee", String(300), nullable=False),  # both in one, because NULLs are never equal
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
    Column("prefix", String(16), nullable=False, unique=True),  # shown, to tell keys apart
    Column("hash", LargeBinary(32), nullable=False),  # SHA-256 of a key of 256 random bits
    Column("scopes", JSON_DOCUMENT, nullable=False),
    Column("roots", JSON_DOCUMENT),  # names; none: all
    Column("created_seconds", Float, nullable=False),
    Column("expires_seconds", Float),
    Column("revoked_seconds", Float),
    Column("used_seconds", Float),
    _ref("account_id", "accounts.id", index=True),  # whose it is; none: its own
    Column("maker", String(256)),  # `Principal.maker`; none: made by the command line
)

sessions: Final = Table(
    "sessions",
    metadata,
    Column("hash", LargeBinary(32), primary_key=True),  # SHA-256 of what a browser's cookie has
    Column("key_id", ID, ForeignKey("api_keys.id")),  # either of both
    Column("account_id", ID, ForeignKey("accounts.id"), index=True),
    Column("created_seconds", Float, nullable=False),
    Column("expires_seconds", Float, nullable=False, index=True),
)
"""Browsers that are signed in with a key or as a person: they have its rights, and no longer than it."""

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
