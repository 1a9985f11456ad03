"""The weights of a state dict, which are saved first where the time is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp.storage.errors import CheckpointError, OptionError

__all__ = ["check_weights", "weights_of"]


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
    """The entries called ``names``, keys joined by dots, in their places. Below the top level they are looked
    for when it is saved, which fails where there is none."""
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
        """Those entries, in their places."""
        whole = self.value.state_dict() if hasattr(self.value, "state_dict") else self.value
        found: dict[str, Any] = {}
        for name, path in self.names.items():
            if not isinstance(whole, Mapping) or not _copy(whole, found, path):
                raise CheckpointError(f"the state has no {name!r}, which was to be saved first", fqn=name)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is loaded by it."""


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
