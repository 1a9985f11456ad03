"""Warnings of what a save stores and a load will not give back as it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dcp.calls.arguments import is_stateful
from dcp.planners.save.trust import foreign_values
from dcp.storage.near_names import listed

__all__ = ["warn_of_foreign", "warn_of_keys"]

logger = logging.getLogger(__name__)

_MAX_TOLD = 10


def warn_of_foreign(fqns: Sequence[str], values: Sequence[Any]) -> None:
    """Log a warning of values that only a trusted checkpoint gives back."""
    found = foreign_values(fqns, values)
    if found:
        logger.warning(
            "%d of the saved values will load only with weights_only=False, or with their classes in "
            "torch.serialization.add_safe_globals: %s. Plain data instead needs neither",
            len(found),
            _told(found),
        )
    nested = [fqn for fqn, value in zip(fqns, values, strict=True) if fqn in found and is_stateful(value)]
    if nested:
        logger.warning(
            "%s: objects with a state_dict() are asked for it at the top level of the state dict only, and "
            "are pickled whole below: put them at the top, or their state_dict() in their place",
            listed(nested, most=_MAX_TOLD),
        )


def warn_of_keys(found: Mapping[str, str]) -> None:
    """Log a warning of keys that no checkpoint gives back; ``found`` are their types by name."""
    if found:
        logger.warning(
            "%d keys of dicts are saved as their strings alone: %s. They are found again in a state dict "
            "that has them, and are strings in any other. Numbers, strings, bytes, None and tuples are kept",
            len(found),
            _told(found),
        )


def _told(found: Mapping[str, str]) -> str:
    return listed(list(found), most=_MAX_TOLD, show=lambda fqn: f"{fqn!r:.200} ({found[fqn]})")
