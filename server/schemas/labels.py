"""Labels: tags, pins and metrics of checkpoints, aliases of runs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from dcp.server.catalog.labelling.aliases import Alias
from dcp.server.schemas.common import MAX_ID, Answer, Finite, Name, Request, rfc3339

__all__ = ["AliasAnswer", "AliasChange", "AliasList", "MetricsChange"]


class MetricsChange(Request):
    """Metrics by name; null takes one away, those that are not named stay."""

    metrics: Annotated[dict[Name, Finite | None], Field(min_length=1, max_length=256)]


class AliasChange(Request):
    """Which checkpoint of the run the alias is to name; ``is_protected`` needs the scope admin."""

    checkpoint_id: Annotated[int, Field(ge=1, le=MAX_ID)]
    is_protected: bool | None = None


class AliasAnswer(Answer):
    """A name that moves from checkpoint to checkpoint of a run. ``etag`` is for If-Match."""

    run_id: int
    name: str
    checkpoint_id: int
    is_protected: bool
    updated_at: str
    updated_by: str | None
    etag: str

    @classmethod
    def of(cls, alias: Alias) -> Self:
        """As the catalog has it."""
        return cls(
            run_id=alias.run_id,
            name=alias.name,
            checkpoint_id=alias.checkpoint_id,
            is_protected=alias.is_protected,
            updated_at=rfc3339(alias.updated_seconds),
            updated_by=alias.updated_by,
            etag=alias.etag,
        )


class AliasList(Answer):
    """All aliases of a run, by name."""

    items: list[AliasAnswer]
