"""Errors of the catalog.

::

    CatalogError
        MissingError        the object does not exist or is not visible
        ChangedError        the object has another version than expected
        StateError          the current state does not allow the operation
        ProtectedError      the name is protected and the caller lacks the scope
        InvalidQueryError   a filter, sort order, label or cursor is invalid
"""

from __future__ import annotations


class CatalogError(Exception):
    """Base of all errors of the catalog; callers may see the text."""


class MissingError(CatalogError):
    """No visible ``what`` (such as "checkpoint") has the name or number ``key``."""

    def __init__(self, what: str, key: int | str) -> None:
        super().__init__(f"{what} {key} not found")
        self.what = what
        self.key = key


class ChangedError(CatalogError):
    """The object changed: the version is ``version``, and ``expected`` was required."""

    def __init__(self, what: str, key: int | str, *, expected: int, version: int) -> None:
        super().__init__(f"{what} {key} was changed: its version is {version}, not {expected}; read it again")
        self.what = what
        self.key = key
        self.expected = expected
        self.version = version


class StateError(CatalogError):
    """The object is in ``state``, which does not allow the operation."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class ProtectedError(CatalogError):
    """The alias ``name`` is protected; the caller may not move or remove it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"alias {name!r} is protected: changes need the scope 'admin'")
        self.name = name


class InvalidQueryError(CatalogError):
    """``field`` of a request has an invalid value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
