"""Features of a save or load, and calls of their methods, whose errors name the feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from dcp.storage.errors import CheckpointError
from dcp.storage.packing import pack


class Feature:
    """One feature in one save or load, on one rank; see `dcp.saving.feature` and `dcp.loading.feature`."""

    name: ClassVar[str] = ""
    """Stands for the feature in messages, also between ranks."""
    option: ClassVar[str] = ""
    """The option of the save or load without which the feature has no part in it; "" for none."""

    def agreed(self) -> dict[str, Any]:
        """Return options that must be the same on all ranks, by the names that a caller knows."""
        return {}


F = TypeVar("F", bound=Feature)


@dataclass(eq=False)
class Features(Generic[F]):
    """The features of one save or load, derived from ``base``, in their order.

    ``names`` are also of those that have no part in it by their option, ``resting`` are those that have none
    in the present call. What one raises that is no error of this package is a CheckpointError with its name.
    """

    base: type[F]
    all: Sequence[F] = ()
    names: Sequence[str] = ()
    resting: Sequence[F] = ()

    def having(self, method: str, *, idle: bool = False) -> Iterator[tuple[F, Callable[..., Any]]]:
        """Features with a ``method`` of their own, if ``idle`` also those at rest, and a function that calls
        it; its first argument is the type of the result."""
        for feature in self.all:
            has_own = getattr(type(feature), method) is not getattr(self.base, method)
            if has_own and (idle or feature not in self.resting):
                yield feature, partial(ask, feature.name, method, getattr(feature, method))

    def each(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` of each."""
        for _, call in self.having(method):
            call(object, *args, **kwargs)

    def through(self, method: str, kind: Any, value: Any, *args: Any) -> Any:
        """Return ``value`` of type ``kind``, as the last one sees it."""
        for _, call in self.having(method):
            value = call(kind, value, *args)
        return value

    def packed(self, method: str, *args: Any, **kwargs: Any) -> bytes:
        """Return what ``method`` of each gives, packed, by name; empty where none gives anything."""
        found = {}
        for feature, call in self.having(method):
            own = call(object, *args, **kwargs)
            if own is not None:
                found[feature.name] = ask(feature.name, method, pack, bytes, own)
        return pack(found) if found else b""

    def agreed(self, others: dict[str, Any]) -> dict[str, Any]:
        """Return options that must be the same on all ranks: ``others``, and the features' names and own."""
        found = others | {"features": [*self.names]}
        for feature, call in self.having("agreed"):
            own = call(dict)
            if odd := [key for key in own if not isinstance(key, str) or key in found]:
                raise refused(feature.name, "agreed", f"{odd[0]!r} is another option's name, or no name")
            found |= own
        return found


def ask(name: str, method: str, function: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, the ``method`` of the feature ``name``, and return its result, which must be a
    ``kind``.

    What is no error of this package is raised as a CheckpointError that has the name, and so is a result of
    another type.
    """
    try:
        result = function(*args, **kwargs)
    except CheckpointError:
        raise
    except Exception as error:
        raise refused(name, method, f"{type(error).__name__}: {error}") from error
    if not isinstance(result, kind):
        wanted = getattr(kind, "__name__", str(kind))
        raise refused(name, method, f"it returned {type(result).__name__}, and {wanted} is wanted")
    return result


def refused(name: str, method: str, why: str) -> CheckpointError:
    """Make the error for what the ``method`` of the feature ``name`` did."""
    return CheckpointError(f"feature {name!r}, {method}: {why}")
