"""Values of harmless classes in pickles, made from checked arguments: the standard library's and numpy's.

Dates and times, paths, decimals, fractions, UUIDs, ``...``, and the containers that torch's safe loading does
not know. No class with code of its own: no enumeration, named tuple or dataclass. Torch-free.

numpy's arrays, scalars and dtypes are made without its own functions for that: `dtype.__setstate__` takes
flags and field offsets as they come, and `_reconstruct` allocates what the shape asks for, so neither may see
what a stranger wrote. Plain dtypes only: bool, numbers, dates, strings and bytes of fixed width, and
structures of these; never "object".
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
from dcp.storage.formats.pickle.decoder import BuiltDict, Constructor, Ignored, Instance

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


Dtype = np.dtype[Any]
Array = npt.NDArray[Any]

_MAX_DIMENSIONS: Final = 64
_MAX_FIELDS: Final = 1 << 10
_MAX_NESTING: Final = 8
_EMPTY_ITEM_BYTES: Final = 1 << 16
"""Also of an array without elements numpy allocates one."""

_TEXT: Final = re.compile(r"[biufcSUVmM]\d{1,9}")
_ORDERS: Final = frozenset("<>=|")
_UNITS: Final = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"))
_PLAIN_KINDS: Final = "biufcSUVmM"


class DtypePickle(Instance):
    """A dtype, None where it is not plain: then ``kind`` says what it needs.

    ``fields`` counts those of a structure, nested ones too, in ``nesting`` levels.
    """

    __slots__ = ("dtype", "fields", "nesting")

    def __init__(self, dtype: Dtype | None, kind: str = "numpy.dtype") -> None:
        super().__init__(kind)
        self.dtype = dtype
        self.fields = 1
        self.nesting = 0

    def build(self, state: Any) -> None:
        """Set byte order, unit, sub-array or fields from what `dtype.__reduce__` gives."""
        if self.dtype is None:
            return
        if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in _ORDERS:
            raise _no_numpy("a dtype's state")
        _, order, base, names, fields, itemsize, _, _ = state[:8]
        if len(state) == 9 and self.dtype.kind in "mM":
            self.dtype = _dated(self.dtype, state[8])
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
        """Repeat the type of a field that is an array."""
        if type(base) is not tuple or len(base) != 2:
            raise _no_numpy("the dtype of a field that is an array")
        if self._contains([base[0]]):
            self.dtype = np.dtype((base[0].dtype, _shape(base[1])))

    def _structure(self, names: Any, fields: Any, itemsize: Any) -> None:
        if type(names) is not tuple or type(fields) is not dict or not 0 < len(names) <= _MAX_FIELDS:
            raise _no_numpy("the fields of a dtype")
        if not all(type(field) is tuple and len(field) in (2, 3) for field in fields.values()):
            raise _no_numpy("the fields of a dtype")
        found = [fields[_text(name)] for name in names]
        if len(fields) != len(names) or any(len(field) == 3 for field in found):
            self._refuse("numpy.dtype with titles")
        elif self._contains([field[0] for field in found]):
            layout: Any = {
                "names": list(names),
                "formats": [field[0].dtype for field in found],
                "offsets": [_size(field[1]) for field in found],
                "itemsize": _size(itemsize),
            }
            self.dtype = np.dtype(layout)

    def _contains(self, parts: list[Any]) -> bool:
        """Return whether all are plain dtypes. Few: numpy walks a structure whenever it compares or prints
        one, shared parts each time."""
        foreign = next((part for part in parts if getattr(part, "dtype", None) is None), None)
        if foreign is not None:
            self._refuse(_name_of(foreign))
            return False
        self.fields = sum(part.fields for part in parts)
        self.nesting = 1 + max(part.nesting for part in parts)
        if self.fields > _MAX_FIELDS or self.nesting > _MAX_NESTING:
            raise _no_numpy("a dtype of too many fields")
        return True

    def _refuse(self, kind: str) -> None:
        self.dtype, self.kind = None, kind


class ArrayPickle(Instance):
    """An array; ``array`` is a read-only view of the pickle's bytes, None as long as they are missing, and
    for what is not plain: then ``kind`` says what it needs."""

    __slots__ = ("array",)

    def __init__(self, array: Array | None = None, kind: str = "numpy.ndarray") -> None:
        super().__init__(kind)
        self.array = array

    def build(self, state: Any) -> None:
        """Set shape, dtype and bytes from what `ndarray.__reduce__` gives."""
        if type(state) is not tuple or len(state) != 5:
            raise _no_numpy("an array's state")
        _, shape, dtype, is_fortran, data = state
        if getattr(dtype, "dtype", None) is None:
            self.kind = _name_of(dtype)
        else:
            self.array = _array(shape, dtype, "F" if is_fortran else "C", data)


def is_plain_dtype(dtype: Dtype) -> bool:
    """Return whether arrays of ``dtype`` are loaded from a pickle."""
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


def _no_numpy(what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{what} in a pickle is not as numpy writes it")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise _no_numpy("a size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _no_numpy("a field's name")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is int:
        return (_size(value),)
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise _no_numpy("a shape")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise _no_numpy("a shape")
    return value


def _dated(dtype: Dtype, state: Any) -> Dtype:
    """Return a datetime64 or timedelta64 of a unit; ``state`` is ``(None or {}, (unit, count, 1, 1))``."""
    if type(state) is not tuple or len(state) != 2 or state[0] or type(state[1]) is not tuple:
        raise _no_numpy("the unit of a dtype")
    unit, *numbers = state[1]
    name = unit.decode("ascii", "replace") if type(unit) is bytes else unit
    if type(name) is not str or name not in _UNITS or len(numbers) != 3 or numbers[1:] != [1, 1]:
        raise _no_numpy("the unit of a dtype")
    count = _size(numbers[0])
    return dtype if name == "generic" else np.dtype(f"{dtype.kind}8[{count}{name}]")


def _array(shape: Any, dtype: Any, order: Any, data: Any) -> Array:
    """Return a view of ``data``, whose length has to be exactly what shape and dtype ask for."""
    if type(dtype) is not DtypePickle or dtype.dtype is None or order not in ("C", "F"):
        raise _no_numpy("an array")
    if type(data) not in (bytes, bytearray):
        raise _no_numpy("an array's data")
    sizes = _shape(shape)
    itemsize = dtype.dtype.itemsize
    is_honest = itemsize <= _EMPTY_ITEM_BYTES if 0 in sizes else itemsize > 0
    if math.prod(sizes) * itemsize != len(data) or not is_honest:
        raise CheckpointFormatError(
            f"an array of shape {sizes} and {itemsize} bytes an element has {len(data)} bytes in the pickle"
        )
    return np.ndarray(sizes, dtype.dtype, memoryview(data).toreadonly(), order=order)


def _name_of(value: Any) -> str:
    """Return what a dtype that is not plain needs."""
    if not isinstance(value, Instance):
        raise _no_numpy("an array's dtype")
    return value.kind


def _dtype(args: tuple[Any, ...]) -> DtypePickle:
    """Make a dtype from a type string; byte order, fields and units come as its state."""
    text = args[0] if args else None
    if len(args) != 3 or not all(type(flag) in (bool, int) for flag in args[1:]):
        raise _no_numpy("a dtype")
    if type(text) is not str:
        return DtypePickle(None, "numpy.dtype of a class")
    if _TEXT.fullmatch(text) is None:
        return DtypePickle(None, f"numpy.dtype({text[:40]!r})")
    return DtypePickle(np.dtype(text))


def _reconstruct(args: tuple[Any, ...]) -> ArrayPickle | Ignored:
    if len(args) != 3 or args[1] != (0,) or args[2] not in (b"b", "b"):
        raise _no_numpy("an array")
    if args[0] is not _NDARRAY:
        return Ignored(getattr(args[0], "name", "a class that is no array"))
    return ArrayPickle()


def _from_buffer(args: tuple[Any, ...]) -> ArrayPickle:
    """Return what protocol 5 has for contiguous arrays."""
    if len(args) != 4:
        raise _no_numpy("an array")
    data, dtype, shape, order = args
    if getattr(dtype, "dtype", None) is None:
        return ArrayPickle(kind=_name_of(dtype))
    return ArrayPickle(_array(shape, dtype, order, data))


def _scalar(args: tuple[Any, ...]) -> Any:
    if len(args) != 2:
        raise _no_numpy("a scalar")
    dtype, data = args
    if getattr(dtype, "dtype", None) is None:
        return Ignored(_name_of(dtype))
    found = dtype.dtype
    if found.names is None and type(data) is bytes and len(data) == found.itemsize > 0:
        return np.frombuffer(data, found)[0]  # a long history of losses is made of these
    return _array((), dtype, "C", data).copy()[()]


_NDARRAY: Final = Constructor("numpy.ndarray")


def _numpy_globals() -> dict[tuple[str, str], Any]:
    """Return the globals; modules have one name in numpy 1, and another one in numpy 2."""
    found: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): _NDARRAY,
        ("numpy", "dtype"): Constructor("numpy.dtype", reduce=_dtype),
    }
    for package in ("numpy.core", "numpy._core"):
        for module, name, function in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        ):
            full = f"{package}.{module}"
            found[full, name] = Constructor(f"{full}.{name}", reduce=function)
    return found


NUMPY_GLOBALS: Final = _numpy_globals()
"""Names that a pickle of arrays may use, as functions of this package."""
