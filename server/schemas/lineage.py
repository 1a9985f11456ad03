"""Where a checkpoint comes from, and what was made of it."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from dcp.server.catalog.lineage import Ancestry
from dcp.server.schemas.common import Answer, rfc3339

__all__ = ["LineageAnswer"]


class LineageNode(Answer):
    """A checkpoint."""

    id: int
    root: str
    key: str
    step: int | None
    format: str
    state: str
    distance: int = Field(description="In steps of making; negative for what it comes from, 0 is itself.")


class LineageEdge(Answer):
    """One was made of another."""

    child_id: int
    parent_id: int
    kind: str = Field(examples=["converted_from", "resumed_from"])
    job_id: int | None
    created_at: str


class LineageAnswer(Answer):
    """All ancestors and descendants that the key may see, nearest first."""

    nodes: list[LineageNode]
    edges: list[LineageEdge]
    is_cut: bool = Field(description="There are more than are shown.")

    @classmethod
    def of(cls, found: Ancestry) -> Self:
        """As the catalog has it."""
        return cls(
            nodes=[
                LineageNode(
                    id=node.id,
                    root=node.root,
                    key=node.key,
                    step=node.step,
                    format=node.format,
                    state=node.state,
                    distance=node.distance,
                )
                for node in found.nodes
            ],
            edges=[
                LineageEdge(
                    child_id=edge.child_id,
                    parent_id=edge.parent_id,
                    kind=edge.kind,
                    job_id=edge.job_id,
                    created_at=rfc3339(edge.created_seconds),
                )
                for edge in found.edges
            ],
            is_cut=found.is_cut,
        )
