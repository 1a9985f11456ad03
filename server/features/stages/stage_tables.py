"""Tables of stages: requests, current holders, and the history."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Float, ForeignKey, Index, String, Table, Text

from dcp.server.database.mapping import ID, JSON_DOCUMENT
from dcp.server.database.tables import metadata, resource_table

stage_requests: Final = resource_table(
    "stage_requests",
    Column("run_id", ID, ForeignKey("runs.id"), nullable=False),
    Column("checkpoint_id", ID, ForeignKey("checkpoints.id"), nullable=False),
    Column("stage", String(128), nullable=False),
    Column("state", String(16), nullable=False),  # a `RequestState`
    Column("reason", Text),
    Column("content", JSON_DOCUMENT, nullable=False),  # marks of the requested content
    Column("approvals", JSON_DOCUMENT, nullable=False),  # [{"by": name, "owner", "maker", "key_id"}, ...]
    Column("requested_by", String(128), nullable=False),
    Column("owner", String(256), nullable=False),  # identity of the requester, never reused
    Column("maker", String(256)),  # `Principal.maker` of the requester
    Index(None, "run_id", "id"),
    Index(None, "checkpoint_id", "id"),
    Index(None, "state", "id"),
)

stage_holders: Final = Table(
    "stage_holders",
    metadata,
    Column("run_id", ID, ForeignKey("runs.id"), primary_key=True),
    Column("stage", String(128), primary_key=True),
    Column("checkpoint_id", ID, ForeignKey("checkpoints.id"), nullable=False, index=True),
    Column("request_id", ID, ForeignKey("stage_requests.id"), nullable=False),
    Column("content", JSON_DOCUMENT, nullable=False),
    Column("promoted_by", String(128), nullable=False),
    Column("promoted_seconds", Float, nullable=False),
)
"""Checkpoint of a run in a stage; set together with the alias of this name."""

stage_entries: Final = Table(
    "stage_entries",
    metadata,
    Column("id", ID, primary_key=True, autoincrement=True),
    Column("run_id", ID, ForeignKey("runs.id"), nullable=False),
    Column("checkpoint_id", ID, ForeignKey("checkpoints.id"), nullable=False),
    Column("request_id", ID, ForeignKey("stage_requests.id")),
    Column("stage", String(128), nullable=False),
    Column("action", String(16), nullable=False),  # a `StageAction`
    Column("by", String(128), nullable=False),
    Column("reason", Text),
    Column("at_seconds", Float, nullable=False),
    Index(None, "run_id", "id"),
)
"""The history, which is never changed."""
