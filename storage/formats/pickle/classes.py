"""Harmless classes in pickles: standard library and numpy values from checked arguments.

Dates and times, paths, decimals, fractions, UUIDs, ``...``, and containers unknown to torch's safe loading.
No classes with code of their own, such as enumerations, named tuples or dataclasses. Torch-free.

numpy's unpickling functions are avoided: `dtype.__setstate__` accepts any flags and field offsets, and
`_reconstruct` allocates any shape. Only plain dtypes: bool, numbers, dates, strings and bytes of fixed
width, and structures of these; never "object".
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import math
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.container_notes import plain_key
from dcp.storage.formats.index import MAX_DIMENSIONS
from dcp.storage.formats.pickle.decoder import BuiltDict, Constructor, Ignored, Instance, instances

DEFAULT_DICT: Final = "collections.defaultdict"

_MAX_DIGITS: Final = 4000
_INTEGER_BITS: Final = 14_000
"""Maximum number of bits of an integer that Python prints in decimal."""

_RATIO: Final = re.compile(r"(-?\d{1,4000})(?:/(\d{1,4000}))?")
FACTORIES: Final = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, set, int, float, str, bool, tuple)
}

Dtype = np.dtype[Any]
Array = npt.NDArray[Any]
_Args = tuple[Any, ...]

_MAX_FIELDS: Final = 1 << 10
_MAX_NESTING: Final = 8
_EMPTY_ITEM_BYTES: Final = 1 << 16
"""Item size for arrays without elements, which numpy also allocates."""

_TEXT: Final = re.compile(r"[biufcSUVmM]\d{1,9}")
_ORDERS: Final = frozenset("<>=|")
_UNITS: Final = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"))
_PLAIN_KINDS: Final = "biufcSUVmM"


def _malformed(what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"the pickle has invalid arguments or an invalid state for {what}")


class DefaultDictPickle(BuiltDict):
    """collections.defaultdict; ``factory`` makes missing values, or is None."""

    __slots__ = ("factory",)

    def __init__(self, factory: type[Any] | None) -> None:
        super().__init__(DEFAULT_DICT)
        self.factory = factory

    def build(self, state: Any) -> None:
        """Refuse a state, because a plain defaultdict has none."""
        raise _malformed(DEFAULT_DICT)


class DequePickle(list[Any]):
    """collections.deque with the last ``max_length`` items."""

    __slots__ = ("max_length",)

    def __init__(self, max_length: int | None) -> None:
        super().__init__()
        self.max_length = max_length


class LatePickle(Instance):
    """Object completed by the state of BUILD; ``value`` is None before."""

    __slots__ = ("_make", "value")

    def __init__(self, kind: str, make: Callable[[Any], Any]) -> None:
        super().__init__(kind)
        self._make = make
        self.value: Any = None

    def build(self, state: Any) -> None:
        """Make the value."""
        self.value = self._make(state)


def _bytes_io(state: Any) -> io.BytesIO:
    """Return an io.BytesIO from bytes, a position and (empty) attributes."""
    data, place, others = state if type(state) is tuple and len(state) == 3 else (None, None, None)
    # A position beyond the end would make the next write allocate up to it.
    if type(data) is not bytes or type(place) is not int or not 0 <= place <= len(data) or others:
        raise _malformed("_io.BytesIO")
    value = io.BytesIO(data)
    value.seek(place)
    return value


def _uuid(state: Any) -> uuid.UUID:
    """Return a uuid.UUID from the integer of `UUID.__getstate__`."""
    number = state.get("int") if isinstance(state, dict) else None
    if type(number) is not int or not 0 <= number < 1 << 128:
        raise _malformed("uuid.UUID")
    return uuid.UUID(int=number)


# -- standard library types from checked arguments: invalid arguments raise ValueError or similar ------------


def _dated(kind: Any, size: int) -> Callable[[_Args], Any]:
    """Return a maker of dates or times from ``size`` bytes and a time zone."""

    def build(args: _Args) -> Any:
        data, *zones = args
        if type(data) is not bytes or len(data) != size:
            raise ValueError(f"a {kind.__name__} needs {size} bytes")
        if len(zones) > 1 or not all(zone is None or type(zone) is datetime.timezone for zone in zones):
            raise ValueError("a time zone must be a datetime.timezone")
        return kind(data, *filter(None, zones)).replace()  # replace() checks day and hour

    return build


def _timezone(args: _Args) -> datetime.timezone:
    offset, *names = args
    names = [] if names == [None] else names
    if type(offset) is not datetime.timedelta or len(names) > 1 or not all(type(n) is str for n in names):
        raise ValueError("a timezone needs a timedelta and an optional name")
    return datetime.timezone(offset, *names) if offset or names else datetime.UTC


def _decimal(args: _Args) -> decimal.Decimal:
    (text,) = args
    if type(text) is not str or len(text) > _MAX_DIGITS:
        raise ValueError(f"a decimal needs a string of at most {_MAX_DIGITS} characters")
    return decimal.Decimal(text)


def _fraction(args: _Args) -> fractions.Fraction:
    """Return a fraction, with a check of strings: ``1e999999999`` is valid but huge."""
    if len(args) == 2:
        return fractions.Fraction(_integer(args[0]), _integer(args[1]))
    match = _RATIO.fullmatch(args[0]) if len(args) == 1 and type(args[0]) is str else None
    if match is None:
        raise ValueError("a fraction needs two integers")
    return fractions.Fraction(int(match[1]), int(match[2] or 1))


def _integer(value: Any) -> int:
    if type(value) is not int or value.bit_length() > _INTEGER_BITS:
        raise ValueError(f"an integer of at most {_INTEGER_BITS} bits is needed")
    return value


def _path(kind: type[pathlib.PurePath]) -> Callable[[_Args], pathlib.PurePath]:
    def build(args: _Args) -> pathlib.PurePath:
        if not all(type(part) is str for part in args):
            raise ValueError("a path part must be a string")
        return kind(*args)

    return build


def _items(kind: type[Any]) -> Callable[[_Args], Any]:
    """Return a maker of sets of values with cheap and collision-free hashes."""

    def build(args: _Args) -> Any:
        (items,) = args or ((),)
        if type(items) not in (list, tuple):
            raise ValueError(f"a {kind.__name__} needs a list of items")
        items = [plain_key(item) if isinstance(item, np.generic) else item for item in items]
        return (
            kind(items)
            if all(map(is_cheap_key, items))
            else Ignored(f"a {kind.__name__} of values other than numbers and strings")
        )

    return build


def is_cheap_key(item: Any) -> bool:
    """Return True for keys with a cheap hash; integers beyond 60 bits can be chosen to collide."""
    if type(item) is tuple:
        return len(item) <= 16 and all(type(part) is not tuple and is_cheap_key(part) for part in item)
    return type(item) in (str, bytes, bool, float, type(None)) or (type(item) is int and abs(item) < 1 << 60)


def _bytearray(args: _Args) -> bytearray:
    if len(args) == 2 and type(args[0]) is str and args[1] == "latin-1":
        return bytearray(args[0].encode("latin-1"))
    (data,) = args or (b"",)
    if type(data) is not bytes:
        raise ValueError("a bytearray needs bytes")
    return bytearray(data)


def _default_dict(args: _Args) -> DefaultDictPickle | Ignored:
    (factory,) = args or (None,)
    if factory is None:
        return DefaultDictPickle(None)
    if type(factory) is not Constructor:
        raise ValueError("the factory of a defaultdict must be a class")
    kind = FACTORIES.get(factory.name)
    return Ignored(f"{DEFAULT_DICT} of {factory.name}") if kind is None else DefaultDictPickle(kind)


def _deque(args: _Args) -> DequePickle:
    items, most = args if len(args) == 2 else (*args, None) if args else ((), None)
    if items not in ((), []) or not (most is None or (type(most) is int and most >= 0)):
        raise ValueError("a deque needs no items and a non-negative maxlen")
    return DequePickle(None if most is None else min(most, (1 << 63) - 1))


def made_of(name: str, build: Callable[[_Args], Any]) -> Constructor:
    """Return a constructor ``build`` of checked arguments; CheckpointFormatError for invalid arguments."""

    def reduce(args: _Args) -> Any:
        try:
            return build(args)
        except CheckpointFormatError:
            raise
        except (ValueError, TypeError, ArithmeticError) as error:
            raise _malformed(name) from error

    return Constructor(name, reduce=reduce)


def _globals() -> dict[tuple[str, str], Any]:
    made: dict[tuple[str, str], Callable[[_Args], Any]] = {
        ("datetime", "date"): _dated(datetime.date, 4),
        ("datetime", "datetime"): _dated(datetime.datetime, 10),
        ("datetime", "time"): _dated(datetime.time, 6),
        ("datetime", "timedelta"): lambda args: datetime.timedelta(*map(_integer, args)),
        ("datetime", "timezone"): _timezone,
        ("decimal", "Decimal"): _decimal,
        ("fractions", "Fraction"): _fraction,
        ("collections", "defaultdict"): _default_dict,
        ("collections", "deque"): _deque,
        ("builtins", "bytearray"): _bytearray,
        ("builtins", "bytes"): lambda args: bytes(_bytearray(args)),  # b"" in protocol 2
        ("builtins", "frozenset"): _items(frozenset),
        ("builtins", "set"): _items(set),
        ("builtins", "slice"): lambda args: slice(
            *(part if part is None else _integer(part) for part in args)
        ),
        ("builtins", "range"): lambda args: range(*map(_integer, args)),
        ("builtins", "xrange"): lambda args: range(*map(_integer, args)),
    }
    native = type(pathlib.Path())  # paths of other systems become pure paths
    for module in ("pathlib", "pathlib._local"):
        for pure in (pathlib.PurePosixPath, pathlib.PureWindowsPath):
            made[module, pure.__name__] = _path(pure)
            made[module, pure.__name__[4:]] = _path(native if issubclass(native, pure) else pure)
    found: dict[tuple[str, str], Any] = {place: made_of(".".join(place), made[place]) for place in made}
    found["builtins", "Ellipsis"], found["builtins", "NotImplemented"] = ..., NotImplemented
    found["uuid", "UUID"] = instances("uuid.UUID", lambda name: LatePickle(name, _uuid))
    found["_io", "BytesIO"] = instances("_io.BytesIO", lambda name: LatePickle(name, _bytes_io))
    return found


STDLIB_GLOBALS: Final = _globals()
"""Allowed names of the standard library, as functions of this package."""


# -- numpy ---------------------------------------------------------------------------------------------------


class DtypePickle(Instance):
    """Dtype, or None if not plain; ``kind`` then names the missing feature.

    ``fields`` counts the fields of a structure with nested ones, in ``nesting`` levels.
    """

    __slots__ = ("dtype", "fields", "nesting")

    def __init__(self, dtype: Dtype | None, kind: str = "numpy.dtype") -> None:
        super().__init__(kind)
        self.dtype = dtype
        self.fields = 1
        self.nesting = 0

    def build(self, state: Any) -> None:
        """Set byte order, unit, sub-array or fields from the state of `dtype.__reduce__`."""
        if self.dtype is None:
            return
        if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in _ORDERS:
            raise _malformed("numpy.dtype")
        _, order, base, names, fields, itemsize, _, _ = state[:8]
        if len(state) == 9 and self.dtype.kind in "mM":
            self.dtype = _of_unit(self.dtype, state[8])
        elif len(state) == 9 and state[8]:
            self._refuse("numpy.dtype with metadata")
            return
        if base is not None:
            self._repeat(base)
        elif names is not None or fields is not None:
            self._structure(names, fields, itemsize)
        elif order in "<>":
            self.dtype = self.dtype.newbyteorder(order)

    def _repeat(self, base: Any) -> None:
        """Set an array field type."""
        if type(base) is not tuple or len(base) != 2:
            raise _malformed("numpy.dtype: invalid array field")
        if self._contains([base[0]]):
            self.dtype = np.dtype((base[0].dtype, _shape(base[1] if type(base[1]) is tuple else (base[1],))))

    def _structure(self, names: Any, fields: Any, itemsize: Any) -> None:
        if (
            type(names) is not tuple
            or type(fields) is not dict
            or not 0 < len(names) <= _MAX_FIELDS
            or not all(type(name) is str and name in fields for name in names)
            or not all(type(field) is tuple and len(field) in (2, 3) for field in fields.values())
        ):
            raise _malformed("numpy.dtype: invalid fields")
        found = [fields[name] for name in names]
        if len(fields) != len(names) or any(len(field) == 3 for field in found):
            self._refuse("numpy.dtype with titles")
        elif self._contains([field[0] for field in found]):
            layout: Any = {
                "names": list(names),
                "formats": [field[0].dtype for field in found],
                "offsets": [_natural(field[1]) for field in found],
                "itemsize": _natural(itemsize),
            }
            self.dtype = np.dtype(layout)

    def _contains(self, parts: list[Any]) -> bool:
        """Return True if all parts are plain dtypes. The number is limited, because numpy walks structures
        on comparison.
        """
        foreign = next((part for part in parts if getattr(part, "dtype", None) is None), None)
        if foreign is not None:
            self._refuse(_name_of(foreign))
            return False
        self.fields = sum(part.fields for part in parts)
        self.nesting = 1 + max(part.nesting for part in parts)
        if self.fields > _MAX_FIELDS or self.nesting > _MAX_NESTING:
            raise _malformed("numpy.dtype: too many fields")
        return True

    def _refuse(self, kind: str) -> None:
        self.dtype, self.kind = None, kind


class ArrayPickle(Instance):
    """Array; ``array`` is a read-only view of the pickle's bytes, None before the bytes are set or if not
    plain; ``kind`` then names the missing feature.
    """

    __slots__ = ("array",)

    def __init__(self) -> None:
        super().__init__("numpy.ndarray")
        self.array: Array | None = None

    def build(self, state: Any) -> None:
        """Set shape, dtype and bytes from the state of `ndarray.__reduce__`."""
        if type(state) is not tuple or len(state) != 5:
            raise _malformed("numpy.ndarray")
        _, shape, dtype, is_fortran, data = state
        self.fill(shape, dtype, "F" if is_fortran else "C", data)

    def fill(self, shape: Any, dtype: Any, order: Any, data: Any) -> None:
        """Set the array, or the missing feature of its dtype."""
        if getattr(dtype, "dtype", None) is None:
            self.kind = _name_of(dtype)
        else:
            self.array = _array(shape, dtype, order, data)


def is_plain_dtype(dtype: Dtype) -> bool:
    """Return True if arrays of ``dtype`` can be loaded from a pickle."""
    if dtype.metadata or dtype.itemsize == 0:
        return False
    if dtype.subdtype is not None:
        return is_plain_dtype(dtype.subdtype[0])
    if dtype.names is not None:
        found: Mapping[str, Any] = dtype.fields or {}
        return dtype.type is np.void and all(
            len(found[name]) == 2 and is_plain_dtype(found[name][0]) for name in dtype.names
        )
    return dtype.kind in _PLAIN_KINDS and dtype.isbuiltin != 2 and dtype.type.__module__ == "numpy"


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise _malformed("numpy.dtype: size out of range")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if (
        type(value) is not tuple
        or len(value) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    ):
        raise _malformed("numpy.ndarray: invalid shape")
    return value


def _of_unit(dtype: Dtype, state: Any) -> Dtype:
    """Return a datetime64 or timedelta64 with a unit; ``state`` is ``(None or {}, (unit, count, 1, 1))``."""
    if type(state) is not tuple or len(state) != 2 or state[0] or type(state[1]) is not tuple:
        raise _malformed("numpy.dtype: invalid unit")
    unit, *numbers = state[1] or (None,)
    name = unit.decode("ascii", "replace") if type(unit) is bytes else unit
    if type(name) is not str or name not in _UNITS or len(numbers) != 3 or numbers[1:] != [1, 1]:
        raise _malformed("numpy.dtype: invalid unit")
    count = _natural(numbers[0])
    return dtype if name == "generic" else np.dtype(f"{dtype.kind}8[{count}{name}]")


def _array(shape: Any, dtype: Any, order: Any, data: Any) -> Array:
    """Return a view of ``data`` with exactly the length of shape and dtype."""
    is_known = type(dtype) is DtypePickle and order in ("C", "F") and type(data) in (bytes, bytearray)
    if not is_known or dtype.dtype is None:
        raise _malformed("numpy.ndarray")
    sizes = _shape(shape)
    itemsize = dtype.dtype.itemsize
    is_honest = itemsize <= _EMPTY_ITEM_BYTES if 0 in sizes else itemsize > 0
    if math.prod(sizes) * itemsize != len(data) or not is_honest:
        raise CheckpointFormatError(
            f"the pickle has {len(data)} bytes for an array of shape {sizes} with {itemsize} bytes an element"
        )
    return np.ndarray(sizes, dtype.dtype, memoryview(data).toreadonly(), order=order)


def _name_of(value: Any) -> str:
    """Return the missing feature of a dtype that is not plain."""
    if not isinstance(value, Instance):
        raise _malformed("numpy.ndarray: invalid dtype")
    return value.kind


def _dtype(args: _Args) -> DtypePickle:
    """Return a dtype from a type string; byte order, fields and units follow as state."""
    text, *flags = args
    if len(flags) != 2 or not all(type(flag) in (bool, int) for flag in flags):
        raise ValueError("a numpy.dtype needs two flags")
    if type(text) is not str:
        return DtypePickle(None, "numpy.dtype of a class")
    if _TEXT.fullmatch(text) is None:
        return DtypePickle(None, f"numpy.dtype({text[:40]!r})")
    return DtypePickle(np.dtype(text))


def _reconstruct(args: _Args) -> ArrayPickle | Ignored:
    kind, shape, typecode = args
    if shape != (0,) or typecode not in (b"b", "b"):
        raise ValueError("_reconstruct() needs the shape (0,) and the type code b")
    return ArrayPickle() if kind is _NDARRAY else Ignored(getattr(kind, "name", "an unknown array class"))


def _from_buffer(args: _Args) -> ArrayPickle:
    """Return a contiguous array of protocol 5."""
    data, dtype, shape, order = args
    array = ArrayPickle()
    array.fill(shape, dtype, order, data)
    return array


def _scalar(args: _Args) -> Any:
    dtype, data = args
    if getattr(dtype, "dtype", None) is None:
        return Ignored(_name_of(dtype))
    found = dtype.dtype
    if found.names is None and type(data) is bytes and len(data) == found.itemsize > 0:
        return np.frombuffer(data, found)[0]  # fast path, e.g. for a long history of losses
    return _array((), dtype, "C", data).copy()[()]


_NDARRAY: Final = Constructor("numpy.ndarray")

NUMPY_GLOBALS: Final = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): made_of("numpy.dtype", _dtype),
    **{
        (f"{package}.{module}", name): made_of(f"{package}.{module}.{name}", build)
        for package in ("numpy.core", "numpy._core")  # numpy 1 and numpy 2
        for module, name, build in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
}
"""Allowed names in pickles of arrays, as functions of this package."""
