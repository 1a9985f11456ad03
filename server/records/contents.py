"""Content of a checkpoint: tensors and values, and the verifications of its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from dcp.server.records.declaring import OneOf, Shown

__all__ = ["EntryKind", "Tensor", "TensorFacts", "TreeNode", "Verification"]

EntryKind = Literal["tensor", "object"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or a value that is none (``kind`` "object", without dtype and shape)."""

    fqn: str
    kind: Annotated[str, OneOf(EntryKind)]
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """What is below one name, summed up; ``entry`` where the name itself is a tensor or a value."""

    name: str
    tensors: int
    objects: int
    bytes: int
    entry: Annotated[Tensor | None, Shown("Set where the name itself is a tensor or a value.")] = None


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a tensor is on one side of a difference."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """One verification; ``is_current``: the checkpoint is still what was verified."""

    id: int
    outcome: Annotated[str, Shown("good or damaged.")]
    mode: str
    is_current: Annotated[bool, Shown("Whether the checkpoint is still what was verified.")]
    findings: Any
    checked_bytes: int
    seconds: float
    created_at: datetime
    job_id: int | None
