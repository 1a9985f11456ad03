"""Principals: callers and their rights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, get_args

from dcp.server.records.administration import Scope

__all__ = ["ALL_SCOPES", "LOCAL", "NO_ROOTS", "SYSTEM", "Principal", "Scope", "account_of"]

ALL_SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))
NO_ROOTS: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. ``name`` appears in the audit log; ``roots`` None means all; ``key_id`` is set for API keys.

    An account, or a key of one, has ``account_id``, ``account`` (its name) and ``rights``: roots by scope
    (None: all roots; missing scope: none). Without ``rights``, the ``scopes`` apply to all ``roots``.
    ``maker`` made a key without account. A route receives the caller limited to the roots with its scope
    (`having`), so ``roots`` bounds queries.
    """

    name: str
    scopes: frozenset[Scope]
    roots: frozenset[str] | None = None
    key_id: int | None = None
    account_id: int | None = None
    account: str | None = None
    rights: Mapping[Scope, frozenset[str] | None] | None = None
    maker: str | None = None

    @property
    def identity(self) -> str:
        """A unique name, never reused for another key or account."""
        if self.key_id is not None:
            return f"key#{self.key_id}"
        return self.name if self.account_id is None else f"account#{self.account_id}"

    @property
    def owner(self) -> str:
        """The account counted by limits and quotas; a key without account counts for itself."""
        return self.identity if self.account_id is None else f"account#{self.account_id}"

    @property
    def answerable(self) -> str:
        """The responsible account: for a key without account, the account of its maker."""
        return self.maker if self.maker is not None and self.maker.startswith("account#") else self.owner

    @property
    def is_admitted(self) -> bool:
        """True if admitted by a key or session, which may end during the answer."""
        return self.key_id is not None or self.account_id is not None

    def roots_with(self, scope: Scope) -> frozenset[str] | None:
        """Return the roots in which the caller has the scope; None for all."""
        if self.rights is not None:
            return self.rights.get(scope, NO_ROOTS)
        return self.roots if scope in self.scopes or "admin" in self.scopes else NO_ROOTS

    def may(self, scope: Scope, root: str | None = None) -> bool:
        """Return True if the caller has the scope in the root, or in any root by default."""
        roots = self.roots_with(scope)
        return roots is None or (bool(roots) if root is None else root in roots)

    def may_everywhere(self, scope: Scope) -> bool:
        """Return True if the caller has the scope in all roots."""
        return self.roots_with(scope) is None

    @property
    def scopes_by_root(self) -> dict[str, tuple[Scope, ...]]:
        """The scopes by root; scopes of all roots under ``*``."""
        found: dict[str, list[Scope]] = {}
        for scope in get_args(Scope):
            roots = self.roots_with(scope)
            for root in ["*"] if roots is None else sorted(roots):
                found.setdefault(root, []).append(scope)
        return {root: tuple(scopes) for root, scopes in found.items()}

    def may_see(self, root: str) -> bool:
        """Return True if the caller may see the root."""
        return self.roots is None or root in self.roots

    def having(self, scope: Scope) -> Principal:
        """Return the caller with ``roots`` limited to those with the scope."""
        return replace(self, roots=self.roots_with(scope))


def account_of(owner: str) -> int | None:
    """Return the account id of the `Principal.owner`; None for a key without account."""
    kind, _, number = owner.partition("#")
    return int(number) if kind == "account" else None


LOCAL: Final = Principal("local", ALL_SCOPES)
"""The caller without authentication (the service then listens on loopback only)."""

SYSTEM: Final = Principal("system", ALL_SCOPES)
"""The service itself: scanner, rules, retention."""
