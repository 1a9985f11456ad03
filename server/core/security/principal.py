"""Principals: callers and their rights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from dcp.server.records.administration import Scope

__all__ = ["ALL_SCOPES", "LOCAL", "SYSTEM", "Principal", "Scope"]

ALL_SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))


@dataclass(frozen=True, slots=True)
class Principal:
    """``name`` is what the audit log says; ``roots`` None is all of them; ``key_id`` is of an API key."""

    name: str
    scopes: frozenset[Scope]
    roots: frozenset[str] | None = None
    key_id: int | None = None

    @property
    def identity(self) -> str:
        """Unique, and never used again for another key."""
        return self.name if self.key_id is None else f"key#{self.key_id}"

    @property
    def owner(self) -> str:
        """The person or service account that limits and quotas count; a key without one counts for itself."""
        return self.identity

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope."""
        return scope in self.scopes or "admin" in self.scopes

    def may_see(self, root: str) -> bool:
        """Return whether the caller may see the root."""
        return self.roots is None or root in self.roots


LOCAL: Final = Principal("local", ALL_SCOPES)
"""The caller where authentication is off (then the service listens on loopback only)."""

SYSTEM: Final = Principal("system", ALL_SCOPES)
"""The service itself: scanner, rules, retention."""
