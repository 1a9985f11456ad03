"""Checkpoints as they are listed and shown, and what a trainer says of one."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from dcp.server.catalog.details import Checkpoint, CheckpointDetail
from dcp.server.catalog.facts import Format, State, Verification
from dcp.server.scanning.registering import Registered, Registration
from dcp.server.schemas.common import (
    MAX_ID,
    Answer,
    Finite,
    Name,
    Request,
    Text,
    optional_rfc3339,
    rfc3339,
)

__all__ = [
    "CheckpointAnswer",
    "CheckpointDetailAnswer",
    "CheckpointList",
    "NewRegistration",
    "RegisteredAnswer",
]

_MAX_LABELS = 256


class CheckpointAnswer(Answer):
    """A checkpoint with its labels. ``etag`` is for If-Match."""

    id: int
    root: str
    run_id: int
    run: str = Field(description="Key of the folder that holds it; empty: the root itself.")
    key: str
    name: str
    step: int | None
    format: Format
    state: State
    committed_at: str
    discovered_at: str
    updated_at: str
    deleted_at: str | None
    purge_after: str | None = Field(description="From then on a deleted one cannot be restored.")
    bytes: int
    file_count: int
    world_size: int | None
    structure_id: int | None
    dtypes: dict[str, int] | None = Field(description="Bytes by dtype.")
    verification: Verification
    verified_at: str | None
    problem: str | None = Field(description="Why it cannot be read, or what verification found.")
    is_pinned: bool
    tags: list[str]
    aliases: list[str]
    metrics: dict[str, float]
    version: int
    etag: str

    @classmethod
    def of(cls, found: Checkpoint) -> Self:
        """As the catalog has it."""
        return cls.model_construct(**_shared(found))


class CheckpointDetailAnswer(CheckpointAnswer):
    """All that is known of a checkpoint."""

    save_id: str | None
    fingerprint: str | None = Field(description="Of its commit: another one is another content.")
    user_metadata: Any
    provenance: Any
    structure_digest: str | None
    tensor_count: int | None
    object_count: int | None
    element_count: int | None

    @classmethod
    def of(cls, found: Checkpoint) -> Self:
        """As the catalog has it."""
        if not isinstance(found, CheckpointDetail):
            raise TypeError("only a CheckpointDetail has all of it")
        return cls.model_construct(
            **_shared(found),
            save_id=found.save_id,
            fingerprint=found.fingerprint,
            user_metadata=found.user_metadata,
            provenance=found.provenance,
            structure_digest=found.structure_digest,
            tensor_count=found.tensor_count,
            object_count=found.object_count,
            element_count=found.element_count,
        )


def _shared(found: Checkpoint) -> dict[str, Any]:
    return {
        "id": found.id,
        "root": found.root,
        "run_id": found.run_id,
        "run": found.run,
        "key": found.key,
        "name": found.name,
        "step": found.step,
        "format": found.format,
        "state": found.state,
        "committed_at": rfc3339(found.committed_seconds),
        "discovered_at": rfc3339(found.discovered_seconds),
        "updated_at": rfc3339(found.updated_seconds),
        "deleted_at": optional_rfc3339(found.deleted_seconds),
        "purge_after": optional_rfc3339(found.purge_after_seconds),
        "bytes": found.bytes,
        "file_count": found.file_count,
        "world_size": found.world_size,
        "structure_id": found.structure_id,
        "dtypes": found.dtypes,
        "verification": found.verification,
        "verified_at": optional_rfc3339(found.verified_seconds),
        "problem": found.problem,
        "is_pinned": found.is_pinned,
        "tags": list(found.tags),
        "aliases": list(found.aliases),
        "metrics": dict(found.metrics),
        "version": found.version,
        "etag": found.etag,
    }


class CheckpointList(Answer):
    """A page."""

    items: list[CheckpointAnswer]
    next_cursor: str | None
    notes: list[str] = Field(
        default=[],
        description="Why something may be missing: a root's first scan has not ended, its last one failed.",
    )


class NewRegistration(Request):
    """A trainer says that there is a checkpoint, or (``deleted``) that there is not any more.

    The service looks for itself: what is committed, and its size and structure, are never taken on anybody's
    word. One of ``root`` and ``root_url`` (the URL of the folder that holds it) is needed.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"root": "main", "key": "run/step-1", "tags": ["nightly"], "metrics": {"loss": 2.5}}]
        }
    )

    root: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None
    root_url: Annotated[Text, StringConstraints(min_length=1)] | None = None
    key: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    step: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    save_id: Annotated[Text, StringConstraints(min_length=1, max_length=64)] | None = None
    tags: Annotated[list[Name], Field(max_length=_MAX_LABELS)] = Field(default_factory=list)
    metrics: Annotated[dict[Name, Finite], Field(max_length=_MAX_LABELS)] = Field(default_factory=dict)
    deleted: bool = False

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if (self.root is None) == (self.root_url is None):
            raise ValueError("one of root and root_url is needed")
        return self

    @property
    def registration(self) -> Registration:
        """For `dcp.server.scanning.registering.register`."""
        return Registration(
            key=self.key,
            root=self.root,
            root_url=self.root_url,
            step=self.step,
            save_id=self.save_id,
            tags=frozenset(self.tags),
            metrics=self.metrics,
            deleted=self.deleted,
        )


class RegisteredAnswer(Answer):
    """What came of it. ``id`` is null where something was deleted that had never been known."""

    id: int | None
    root: str
    key: str
    is_new: bool
    is_present: bool
    save_id: str | None

    @classmethod
    def of(cls, found: Registered) -> Self:
        """As it was registered."""
        return cls(
            id=found.id,
            root=found.root,
            key=found.key,
            is_new=found.is_new,
            is_present=found.is_present,
            save_id=found.save_id,
        )
