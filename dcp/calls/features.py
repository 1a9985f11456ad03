"""Features of a save or load, and calls of their methods with errors that name the feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from dcp.storage.errors import CheckpointError
from dcp.storage.packing import pack


class Feature:
    """One feature in one save or load on one rank; see `dcp.saving.feature` and `dcp.loading.feature`."""

    name: ClassVar[str] = ""
    """Stands for the feature in messages, also between ranks."""
    option: ClassVar[str] = ""
    """Option that activates the feature; "" for always."""

    def agreed(self) -> dict[str, Any]:
        """Return options that must be equal on all ranks, by public name."""
        return {}


F = TypeVar("F", bound=Feature)


@dataclass(eq=False)
class Features(Generic[F]):
    """Features of one save or load, subclasses of ``base``, in order.

    ``names`` includes features inactive by their option; ``resting`` are those inactive in the present call.
    Foreign exceptions become CheckpointError with the feature's name.
    """

    base: type[F]
    all: Sequence[F] = ()
    names: Sequence[str] = ()
    resting: Sequence[F] = ()

    def having(self, method: str, *, idle: bool = False) -> Iterator[tuple[F, Callable[..., Any]]]:
        """Yield features that override ``method`` (with ``idle``, inactive ones too), with a function to call
        it.

        The first argument of the function is the type of the result.
        """
        for feature in self.all:
            has_own = getattr(type(feature), method) is not getattr(self.base, method)
            if has_own and (idle or feature not in self.resting):
                yield feature, partial(ask, feature.name, method, getattr(feature, method))

    def each(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` of each."""
        for _, call in self.having(method):
            call(object, *args, **kwargs)

    def through(self, method: str, kind: Any, value: Any, *args: Any) -> Any:
        """Pass ``value`` of type ``kind`` through all features."""
        for _, call in self.having(method):
            value = call(kind, value, *args)
        return value

    def packed(self, method: str, *args: Any, **kwargs: Any) -> bytes:
        """Return the packed results of ``method`` by name; empty without results."""
        found = {}
        for feature, call in self.having(method):
            own = call(object, *args, **kwargs)
            if own is not None:
                found[feature.name] = ask(feature.name, method, pack, bytes, own)
        return pack(found) if found else b""

    def agreed(self, others: dict[str, Any]) -> dict[str, Any]:
        """Return options that must be equal on all ranks: ``others``, and the features' names and options."""
        found = others | {"features": [*self.names]}
        for feature, call in self.having("agreed"):
            own = call(dict)
            if odd := [key for key in own if not isinstance(key, str) or key in found]:
                raise refused(feature.name, "agreed", f"{odd[0]!r} is not a string, or names another option")
            found |= own
        return found


def ask(name: str, method: str, function: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, the ``method`` of the feature ``name``; the result must be a ``kind``.

    Foreign exceptions and results of another type become CheckpointError with the feature's name.
    """
    try:
        result = function(*args, **kwargs)
    except CheckpointError:
        raise
    except Exception as error:
        raise refused(name, method, f"{type(error).__name__}: {error}") from error
    if not isinstance(result, kind):
        wanted = getattr(kind, "__name__", str(kind))
        raise refused(name, method, f"it returned {type(result).__name__} instead of {wanted}")
    return result


def refused(name: str, method: str, why: str) -> CheckpointError:
    """Return an error for the ``method`` of the feature ``name``."""
    return CheckpointError(f"feature {name!r}, {method}: {why}")
