"""Contents of a manager's save besides the state itself: user metadata, and the weights that are saved first
where the time is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, SupportsFloat

import msgpack
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp.steps.notes import PARTIAL
from dcp.storage.errors import CheckpointError, OptionError

__all__ = ["Metrics", "check_weights", "user_metadata_of", "weights_of"]

Metrics = Mapping[str, SupportsFloat]
"""By name: numbers, numpy's too, or tensors and arrays of no dimension; NaN is allowed."""

_LONGEST_SHOWN = 200
_OURS = frozenset({"step", "metrics", "run", PARTIAL})


def user_metadata_of(
    step: int, metrics: Metrics | None, run: str | None, others: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Make the user metadata of a save; ``metrics`` as floats.

    Raises OptionError for a metric that is not a number, and for ``others`` that are not plain data or under
    names that the manager uses.
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


def check_weights(state_dict: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise OptionError for a name that no entry of ``state_dict`` has, as far as its top level tells."""
    for name in names:
        if not any(name == key or name.startswith(f"{key}.") for key in state_dict):
            keys = ", ".join(map(repr, [*state_dict][:8]))
            raise OptionError(
                f"grace_seconds: the state has no {name!r} to be saved first where the time is short; it has "
                f"{keys}. Name its weights, as by weights='app.model', or say weights=() for whole states"
            )


def weights_of(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the entries called ``names``, keys joined by dots, in their places. Below the top level they are
    looked for when it is saved, which fails where there is none."""
    found: dict[str, Any] = {}
    for key, value in state_dict.items():
        below = [name for name in names if name.startswith(f"{key}.")]
        if key in names:
            found[key] = value
        elif below:
            found[key] = _SomeEntries(value, {name: name.removeprefix(f"{key}.") for name in below})
    return found


@dataclass(frozen=True)
class _SomeEntries:
    """Some entries of ``value``: by their names what they are called in it."""

    value: Any
    names: Mapping[str, str]

    def state_dict(self) -> dict[str, Any]:
        """Return those entries, in their places."""
        whole = self.value.state_dict() if hasattr(self.value, "state_dict") else self.value
        found: dict[str, Any] = {}
        for name, path in self.names.items():
            if not isinstance(whole, Mapping) or not _copy(whole, found, path):
                raise CheckpointError(f"the state has no {name!r}, which was to be saved first", fqn=name)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: nothing is loaded by it."""


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: str) -> bool:
    """Put the entry ``path`` of ``source`` into ``target``, in its place; False if there is none."""
    for key, value in source.items():
        if str(key) == path:
            target[key] = value
            return True
        if path.startswith(f"{key}.") and isinstance(value, Mapping):
            below = target.setdefault(key, {})
            if _copy(value, below, path.removeprefix(f"{key}.")):
                return True
    return False
