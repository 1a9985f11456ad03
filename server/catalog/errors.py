"""Errors of the catalog.

::

    CatalogError
        MissingError        there is none, or none that may be seen
        ChangedError        it is not in the version that was expected
        StateError          not in this state
        ProtectedError      a protected name, without the scope for it
        InvalidQueryError   a filter, sort, label or cursor that cannot be meant
"""

from __future__ import annotations


class CatalogError(Exception):
    """Base of all; its text may be shown to the caller."""


class MissingError(CatalogError):
    """There is no ``what`` (such as "checkpoint") called or numbered ``key``, or none that may be seen."""

    def __init__(self, what: str, key: int | str) -> None:
        super().__init__(f"there is no {what} {key}")
        self.what = what
        self.key = key


class ChangedError(CatalogError):
    """It was changed since: it has ``version``, and ``expected`` was required."""

    def __init__(self, what: str, key: int | str, *, expected: int, version: int) -> None:
        super().__init__(f"{what} {key} has changed: it is in version {version}, not {expected}")
        self.what = what
        self.key = key
        self.expected = expected
        self.version = version


class StateError(CatalogError):
    """It is in ``state``, in which this cannot be done."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class ProtectedError(CatalogError):
    """The alias ``name`` is protected; the caller may not move or remove it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"alias {name!r} is protected: that needs the scope admin")
        self.name = name


class InvalidQueryError(CatalogError):
    """``field`` of a request cannot be meant so."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
