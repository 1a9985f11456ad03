"""Drift of a run as it is answered and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from dcp.server.records.declaring import Shown

__all__ = ["DriftLayer", "DriftStep", "RunDrift"]


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Two neighbouring steps: checkpoint ``b`` at ``step``, and ``a`` at ``from_step``. ``added`` and
    ``removed`` count tensors. ``problem``: the reason why they could not be compared."""

    a: int
    b: int
    from_step: int | None
    step: int | None
    problem: str | None
    added: int = 0
    removed: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class DriftLayer:
    """The tensors of one layer, or of ``layers`` neighbouring ones where there are very many, by step.

    ``relative_l2``: the root mean square of theirs, weighed by elements. ``changed``: the share of elements
    that are not the same. ``nonfinite``: NaN or infinite elements after the step, also of tensors that are
    as they were when these came in. A step after which all elements of the layer are such has no
    ``relative_l2``.
    """

    name: str
    relative_l2: tuple[float | None, ...]
    changed: tuple[float | None, ...]
    nonfinite: tuple[int | None, ...]
    layers: Annotated[
        int, Shown("Neighbouring ones are one where there are very many.", may_be_absent=True)
    ] = 1


@dataclass(frozen=True, slots=True)
class RunDrift:
    """Changes of a run's tensors between steps, as a job found them. ``layers``: at most 512 rows, which
    cover all ``layer_count`` layers."""

    run_id: int
    job_id: int
    created_at: datetime
    steps: tuple[DriftStep, ...]
    layers: tuple[DriftLayer, ...]
    layer_count: int
