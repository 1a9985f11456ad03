"""Values of decoded pickles: inert values in place of foreign functions, classes and their objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError, UnsupportedFormatError

__all__ = [
    "BuiltDict",
    "Constructor",
    "Find",
    "Ignored",
    "Instance",
    "allow_list",
    "instances",
]

_DTYPE_NAME: Final = re.compile(r"q?u?(int|bits|b?float|b?complex)\d[a-z0-9_]{0,40}")

Find: TypeAlias = Callable[[str, str], Any]
"""(module, name) -> the inert value or `Constructor` that stands for the global, or UnsafeObjectError."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """A global that may be called: by REDUCE as a function, by NEWOBJ as a class; None where it may not.

    The functions are ours. They get the arguments as the file gives them, as one tuple, and must check them,
    raising CheckpointFormatError.
    """

    name: str
    reduce: Callable[[tuple[Any, ...]], Any] | None = None
    new: Callable[[tuple[Any, ...]], Any] | None = None


class Instance:
    """An object of a foreign class, not made: its class's name and the state that BUILD gave it.

    Compared and hashed by identity, so that it can be a key whatever its state.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Do what BUILD does."""
        self.state = state


class Ignored(Instance):
    """In place of what a class or function outside the list would have made, where that is allowed to spoil
    one entry alone: takes whatever the pickle does to it, and keeps nothing.

    ``kind`` names the class or function; ``is_tensor`` is set where a tensor would stand.
    """

    __slots__ = ("is_tensor",)

    def __init__(self, kind: str, *, is_tensor: bool = False) -> None:
        super().__init__(kind)
        self.is_tensor = is_tensor

    def build(self, state: Any) -> None:
        """Keep nothing."""


class BuiltDict(dict[Any, Any]):
    """A dict of the subclass ``kind`` ("collections.OrderedDict"), with the state that BUILD gave it."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str, items: Mapping[Any, Any] | None = None) -> None:
        super().__init__(items or {})
        self.kind = kind
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Do what BUILD does."""
        self.state = state


def instances(name: str) -> Constructor:
    """Return a class whose objects are kept as `Instance`; NEWOBJ without arguments makes one, REDUCE is
    refused."""

    def new(args: tuple[Any, ...]) -> Instance:
        if args:
            raise CheckpointFormatError(
                f"a pickle makes a {name} from {len(args)} arguments, which none takes"
            )
        return Instance(name)

    return Constructor(name, new=new)


def allow_list(allowed: Mapping[tuple[str, str], Any], *, what: str) -> Find:
    """Return a ``find`` which knows ``allowed`` alone; ``what`` names the file's kind in the error.

    It raises UnsafeObjectError for other names, UnsupportedFormatError for what can only be a dtype of torch.
    """

    def find(module: str, name: str) -> Any:
        try:
            return allowed[module, name]
        except KeyError:
            full = f"{module}.{name}"[:200]
            if module == "torch" and _DTYPE_NAME.fullmatch(name):
                raise UnsupportedFormatError(
                    f"{what} names {full}, a dtype that is not known here: it was written by a newer torch; "
                    "load it with that",
                    global_name=full,
                ) from None
            raise UnsafeObjectError(
                f"{what} names {full!a}, which is not on the list of what such a file may contain. Nothing "
                "was run; if you trust the file, load it with stock torch and save it again",
                global_name=full,
            ) from None

    return find
