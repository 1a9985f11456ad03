"""Values of harmless classes of the standard library in pickles, made from checked arguments.

Dates and times, paths, decimals, fractions, UUIDs, ``...``, and the containers that torch's safe loading does
not know. No class with code of its own: no enumeration, named tuple or dataclass. Torch-free.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.container_notes import plain_key
from dcp.storage.formats.pickle.values import BuiltDict, Constructor, Ignored, Instance

__all__ = [
    "DEFAULT_DICT",
    "FACTORIES",
    "STDLIB_GLOBALS",
    "BytesIOPickle",
    "DefaultDictPickle",
    "DequePickle",
    "UuidPickle",
]

DEFAULT_DICT: Final = "collections.defaultdict"

_MAX_DIGITS: Final = 4000
_INTEGER_BITS: Final = 14_000
"""So many Python prints in decimal digits."""

_RATIO: Final = re.compile(r"(-?\d{1,4000})(?:/(\d{1,4000}))?")
FACTORIES: Final = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, set, int, float, str, bool, tuple)
}


class DefaultDictPickle(BuiltDict):
    """A collections.defaultdict; ``factory`` makes its missing values, or is None."""

    __slots__ = ("factory",)

    def __init__(self, factory: type[Any] | None) -> None:
        super().__init__(DEFAULT_DICT)
        self.factory = factory

    def build(self, state: Any) -> None:
        """Refuse a state: a plain defaultdict has none."""
        raise _malformed(DEFAULT_DICT)


class DequePickle(list[Any]):
    """A collections.deque; of more than ``max_length`` items the last ones are in it."""

    __slots__ = ("max_length",)

    def __init__(self, max_length: int | None) -> None:
        super().__init__()
        self.max_length = max_length


class BytesIOPickle(Instance):
    """An io.BytesIO, which is bytes and a place in them; ``data`` is None as long as these are missing."""

    __slots__ = ("data", "place")

    def __init__(self) -> None:
        super().__init__("_io.BytesIO")
        self.data: bytes | None = None
        self.place = 0

    def build(self, state: Any) -> None:
        """Set bytes, place and attributes, of which a BytesIO has none."""
        if type(state) is not tuple or len(state) != 3 or state[2] not in (None, {}):
            raise _malformed(self.kind)
        data, place, _ = state
        # A place behind the end would make the next write as long as it says.
        if type(data) is not bytes or type(place) is not int or not 0 <= place <= len(data):
            raise _malformed(self.kind)
        self.data, self.place = data, place

    def made(self) -> io.BytesIO | None:
        """Return the value; None while it is not complete."""
        if self.data is None:
            return None
        value = io.BytesIO(self.data)
        value.seek(self.place)
        return value


class UuidPickle(Instance):
    """A uuid.UUID; ``value`` is None as long as its number is missing."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        super().__init__("uuid.UUID")
        self.value: uuid.UUID | None = None

    def build(self, state: Any) -> None:
        """Set its number, which `UUID.__getstate__` gives."""
        number = state.get("int") if isinstance(state, dict) else None
        if type(number) is not int or not 0 <= number < 1 << 128:
            raise _malformed("uuid.UUID")
        self.value = uuid.UUID(int=number)


def _malformed(name: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"a pickled {name} is not made of what that class takes")


def _date(args: tuple[Any, ...]) -> datetime.date:
    (data,) = args
    return datetime.date(int.from_bytes(_exactly(data, 4)[:2]), data[2], data[3])


def _datetime(args: tuple[Any, ...]) -> datetime.datetime:
    data, zone = _with_zone(args, 10)
    day = datetime.date(int.from_bytes(data[:2]), data[2] & 0x7F, data[3])
    hour, minute, second = data[4:7]
    time = datetime.time(hour, minute, second, int.from_bytes(data[7:]), zone, fold=data[2] >> 7)
    return datetime.datetime.combine(day, time)


def _time(args: tuple[Any, ...]) -> datetime.time:
    data, zone = _with_zone(args, 6)
    return datetime.time(data[0] & 0x7F, data[1], data[2], int.from_bytes(data[3:]), zone, fold=data[0] >> 7)


def _with_zone(args: tuple[Any, ...], count: int) -> tuple[bytes, datetime.timezone | None]:
    data, zone = args if len(args) == 2 else (*args, None)
    if zone is not None and type(zone) is not datetime.timezone:
        raise ValueError("a time zone of another class")
    return _exactly(data, count), zone


def _exactly(data: Any, count: int) -> bytes:
    if type(data) is not bytes or len(data) != count:
        raise ValueError("not the bytes of a date")
    return data


def _timedelta(args: tuple[Any, ...]) -> datetime.timedelta:
    days, seconds, microseconds = map(_integer, args)
    return datetime.timedelta(days, seconds, microseconds)


def _timezone(args: tuple[Any, ...]) -> datetime.timezone:
    offset, name = args if len(args) == 2 else (*args, None)
    if type(offset) is not datetime.timedelta or type(name) not in (str, type(None)):
        raise ValueError("not an offset and a name")
    if name is None:
        return datetime.UTC if not offset else datetime.timezone(offset)
    return datetime.timezone(offset, name)


def _decimal(args: tuple[Any, ...]) -> decimal.Decimal:
    (text,) = args
    if type(text) is not str or len(text) > _MAX_DIGITS:
        raise ValueError("not the digits of a decimal")
    return decimal.Decimal(text)


def _fraction(args: tuple[Any, ...]) -> fractions.Fraction:
    """Make a fraction, never from a string as it is: ``1e999999999`` is one."""
    if len(args) == 2:
        return fractions.Fraction(_integer(args[0]), _integer(args[1]))
    match = _RATIO.fullmatch(args[0]) if len(args) == 1 and type(args[0]) is str else None
    if match is None:
        raise ValueError("no ratio of two integers")
    return fractions.Fraction(int(match[1]), int(match[2] or 1))


def _integer(value: Any) -> int:
    if type(value) is not int or value.bit_length() > _INTEGER_BITS:
        raise ValueError("no integer, or a huge one")
    return value


def _path(flavour: type[pathlib.PurePath]) -> Callable[[tuple[Any, ...]], pathlib.PurePath]:
    """Return a path that can be used where its system is this one, else a pure one."""
    native = type(pathlib.Path())
    kind = native if issubclass(native, flavour) else flavour

    def build(args: tuple[Any, ...]) -> pathlib.PurePath:
        if not all(type(part) is str for part in args):
            raise ValueError("a part that is no string")
        return kind(*args)

    return build


def _pure(kind: type[pathlib.PurePath]) -> Callable[[tuple[Any, ...]], pathlib.PurePath]:
    def build(args: tuple[Any, ...]) -> pathlib.PurePath:
        if not all(type(part) is str for part in args):
            raise ValueError("a part that is no string")
        return kind(*args)

    return build


def _items(args: tuple[Any, ...], kind: type[Any]) -> Any:
    """Return a set of values that are cheap to hash, and cannot be chosen to collide."""
    if not args:
        return kind()
    (items,) = args
    if type(items) not in (list, tuple):
        raise ValueError("no list of items")
    items = [plain_key(item) if isinstance(item, np.generic) else item for item in items]
    strange = next((item for item in items if not _is_cheap_key(item)), None)
    if strange is not None:
        return Ignored(f"a {kind.__name__} of more than numbers and text")
    return kind(items)


def _is_cheap_key(item: Any) -> bool:
    if type(item) is tuple:
        return len(item) <= 16 and all(type(part) is not tuple and _is_cheap_key(part) for part in item)
    return type(item) in (str, bytes, bool, float, type(None)) or (type(item) is int and abs(item) < 1 << 60)


def _bytearray(args: tuple[Any, ...]) -> bytearray:
    if not args:
        return bytearray()
    if len(args) == 2 and type(args[0]) is str and args[1] == "latin-1":
        return bytearray(args[0].encode("latin-1"))
    (data,) = args
    if type(data) is not bytes:
        raise ValueError("not its bytes")
    return bytearray(data)


def _no_bytes(args: tuple[Any, ...]) -> bytes:
    """Return how protocol 2 has ``b""``."""
    if args:
        raise ValueError("arguments")
    return b""


def _range(args: tuple[Any, ...]) -> range:
    return range(*map(_integer, args))


def _slice(args: tuple[Any, ...]) -> slice:
    begin, end, step = (None if part is None else _integer(part) for part in args)
    return slice(begin, end, step)


def _default_dict(args: tuple[Any, ...]) -> DefaultDictPickle | Ignored:
    factory = args[0] if len(args) == 1 else None
    if len(args) > 1 or not (factory is None or type(factory) is Constructor):
        raise ValueError("a factory that is no type")
    if factory is None:
        return DefaultDictPickle(None)
    kind = FACTORIES.get(factory.name)
    return Ignored(f"{DEFAULT_DICT} of {factory.name}") if kind is None else DefaultDictPickle(kind)


def _deque(args: tuple[Any, ...]) -> DequePickle:
    items, most = args if len(args) == 2 else (*args, None) if args else ((), None)
    if items not in ((), []) or not (most is None or type(most) is int):
        raise ValueError("items before its own")
    return DequePickle(None if most is None else min(_natural(most), (1 << 63) - 1))


def _natural(value: int) -> int:
    if value < 0:
        raise ValueError("a negative length")
    return value


def _made(name: str, build: Callable[[tuple[Any, ...]], Any]) -> Constructor:
    def reduce(args: tuple[Any, ...]) -> Any:
        try:
            return build(args)
        except (ValueError, TypeError, ArithmeticError, UnicodeError) as error:
            raise _malformed(name) from error

    return Constructor(name, reduce=reduce)


def _new_uuid(args: tuple[Any, ...]) -> UuidPickle:
    if args:
        raise _malformed("uuid.UUID")
    return UuidPickle()


def _new_bytes_io(args: tuple[Any, ...]) -> BytesIOPickle:
    if args:
        raise _malformed("_io.BytesIO")
    return BytesIOPickle()


def _globals() -> dict[tuple[str, str], Any]:
    made: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
        ("datetime", "date"): _date,
        ("datetime", "datetime"): _datetime,
        ("datetime", "time"): _time,
        ("datetime", "timedelta"): _timedelta,
        ("datetime", "timezone"): _timezone,
        ("decimal", "Decimal"): _decimal,
        ("fractions", "Fraction"): _fraction,
        ("collections", "defaultdict"): _default_dict,
        ("collections", "deque"): _deque,
        ("builtins", "bytearray"): _bytearray,
        ("builtins", "bytes"): _no_bytes,
        ("builtins", "frozenset"): lambda args: _items(args, frozenset),
        ("builtins", "set"): lambda args: _items(args, set),
        ("builtins", "slice"): _slice,
        ("builtins", "range"): _range,
        ("builtins", "xrange"): _range,
    }
    for module in ("pathlib", "pathlib._local"):
        made[module, "PosixPath"] = _path(pathlib.PurePosixPath)
        made[module, "WindowsPath"] = _path(pathlib.PureWindowsPath)
        made[module, "PurePosixPath"] = _pure(pathlib.PurePosixPath)
        made[module, "PureWindowsPath"] = _pure(pathlib.PureWindowsPath)
    found: dict[tuple[str, str], Any] = {
        (module, name): _made(f"{module}.{name}", build) for (module, name), build in made.items()
    }
    found["builtins", "Ellipsis"], found["builtins", "NotImplemented"] = ..., NotImplemented
    found["uuid", "UUID"] = Constructor("uuid.UUID", new=_new_uuid)
    found["_io", "BytesIO"] = Constructor("_io.BytesIO", new=_new_bytes_io)
    return found


STDLIB_GLOBALS: Final = _globals()
"""Names of the standard library that a pickle may use, as functions of this package."""
