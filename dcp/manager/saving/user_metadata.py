"""What a manager stores with a checkpoint besides the state: step, metrics, run, and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, SupportsFloat

import msgpack
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp.steps.states import PARTIAL
from dcp.storage.errors import OptionError

__all__ = ["Metrics", "user_metadata_of"]

Metrics = Mapping[str, SupportsFloat]
"""By name: numbers, numpy's too, or tensors and arrays of no dimension; NaN is allowed."""

_LONGEST_SHOWN = 200
_OURS = frozenset({"step", "metrics", "run", PARTIAL})


def user_metadata_of(
    step: int, metrics: Metrics | None, run: str | None, others: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The user metadata of a save; ``metrics`` as floats.

    Raises OptionError for a metric that is not a number, and for ``others`` that are not plain data or under
    names of ours.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"metrics must map names to numbers, not be a {type(metrics).__name__}")
    try:  # now, because in the background each save would fail by it
        msgpack.packb(dict(others or {}))
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(
            f"user_metadata must be plain data (numbers, text, lists, dicts): {error}"
        ) from error
    taken = sorted(_OURS.intersection(others or {}))
    if taken:
        raise OptionError(
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
        raise OptionError(f"metrics: the name {name!r} is not a string")
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        raise OptionError(f"metrics: {name!r} is not reduced over the ranks yet: give its full_tensor()")
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.dtype.is_complex:
        return float(value.item())
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    shown = repr(value) if len(repr(value)) < _LONGEST_SHOWN else f"a {type(value).__name__}"
    raise OptionError(f"metrics: {name!r} must be a number or a 0-d tensor of one, not {shown}")
