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
    """``name`` is what the audit log says; ``roots`` None is all of them; ``key_id`` is of an API key.

    A person or service account, and a key of one, has ``account_id``, ``account``, which is its name, and
    ``rights``: the roots in which it has each scope (None: all of them; a scope that is missing: none).
    Without ``rights`` it has its ``scopes`` in all of its ``roots``. ``maker``: the account or key that made
    a key without an account. A route gets the caller with the roots
    where it has the route's scope (`having`), so that ``roots`` are what a query may see.
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
        """Unique, and never used again for another key or account."""
        if self.key_id is not None:
            return f"key#{self.key_id}"
        return self.name if self.account_id is None else f"account#{self.account_id}"

    @property
    def owner(self) -> str:
        """The person or service account that limits and quotas count; a key without one counts for itself."""
        return self.identity if self.account_id is None else f"account#{self.account_id}"

    @property
    def answerable(self) -> str:
        """The account that answers for the caller: of a key without one, the account that made it."""
        return self.maker if self.maker is not None and self.maker.startswith("account#") else self.owner

    @property
    def is_admitted(self) -> bool:
        """True if it was admitted by a key or a session, which may end while it is answered."""
        return self.key_id is not None or self.account_id is not None

    def roots_with(self, scope: Scope) -> frozenset[str] | None:
        """Return the roots in which the caller has the scope; None for all."""
        if self.rights is not None:
            return self.rights.get(scope, NO_ROOTS)
        return self.roots if scope in self.scopes or "admin" in self.scopes else NO_ROOTS

    def may(self, scope: Scope, root: str | None = None) -> bool:
        """Return whether the caller has the scope in the root; without one, in any."""
        roots = self.roots_with(scope)
        return roots is None or (bool(roots) if root is None else root in roots)

    def may_everywhere(self, scope: Scope) -> bool:
        """Return whether the caller has the scope in all roots."""
        return self.roots_with(scope) is None

    @property
    def scopes_by_root(self) -> dict[str, tuple[Scope, ...]]:
        """The scopes by root; those of all roots by ``*``."""
        found: dict[str, list[Scope]] = {}
        for scope in get_args(Scope):
            roots = self.roots_with(scope)
            for root in ["*"] if roots is None else sorted(roots):
                found.setdefault(root, []).append(scope)
        return {root: tuple(scopes) for root, scopes in found.items()}

    def may_see(self, root: str) -> bool:
        """Return whether the caller may see the root."""
        return self.roots is None or root in self.roots

    def having(self, scope: Scope) -> Principal:
        """Return the caller for what needs the scope: its ``roots`` are those where it has the scope."""
        return replace(self, roots=self.roots_with(scope))


def account_of(owner: str) -> int | None:
    """Return the id of the account that is the `Principal.owner`; None for a key without one."""
    kind, _, number = owner.partition("#")
    return int(number) if kind == "account" else None


LOCAL: Final = Principal("local", ALL_SCOPES)
"""The caller where authentication is off (then the service listens on loopback only)."""

SYSTEM: Final = Principal("system", ALL_SCOPES)
"""The service itself: scanner, rules, retention."""
