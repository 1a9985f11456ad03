"""What a manager stores with a checkpoint besides the state: step, metrics, run, and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

__all__ = ["user_metadata_of"]

_OURS = frozenset({"step", "metrics", "run"})


def user_metadata_of(
    step: int, metrics: Mapping[str, float] | None, run: str | None, others: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The user metadata of a save; ``metrics`` as floats.

    Raises TypeError for a metric that is not a number, and ValueError for ``others`` under names of ours.
    """
    taken = sorted(_OURS.intersection(others or {}))
    if taken:
        raise ValueError(
            f"user_metadata may not have {taken[0]!r}: the manager stores its own under that name"
        )
    described: dict[str, Any] = {**(others or {}), "step": step}
    if metrics:
        described["metrics"] = {name: _number(name, value) for name, value in metrics.items()}
    if run is not None:
        described["run"] = run
    return described


def _number(name: object, value: object) -> float:
    if not isinstance(name, str):
        raise TypeError(f"metrics: the name {name!r} is not a string")
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.dtype.is_complex:
        return float(value.item())
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"metrics: {name!r} must be a number or a 0-d tensor of one, not {value!r}")
