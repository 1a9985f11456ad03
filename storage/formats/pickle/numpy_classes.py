"""numpy's arrays, scalars and dtypes in pickles, made from checked facts; numpy's own functions for that are
not called.

`dtype.__setstate__` takes flags and field offsets as they come, and `_reconstruct` allocates what the shape
asks for, so neither may see what a stranger wrote. Plain dtypes only: bool, numbers, dates, strings and bytes
of fixed width, and structures of these; never "object".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.pickle.values import Constructor, Ignored, Instance

__all__ = ["NUMPY_GLOBALS", "ArrayPickle", "DtypePickle", "is_plain_dtype"]

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
            raise _malformed("a dtype's state")
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
            raise _malformed("the dtype of a field that is an array")
        if self._contains([base[0]]):
            self.dtype = np.dtype((base[0].dtype, _shape(base[1])))

    def _structure(self, names: Any, fields: Any, itemsize: Any) -> None:
        if type(names) is not tuple or type(fields) is not dict or not 0 < len(names) <= _MAX_FIELDS:
            raise _malformed("the fields of a dtype")
        if not all(type(field) is tuple and len(field) in (2, 3) for field in fields.values()):
            raise _malformed("the fields of a dtype")
        found = [fields[_text(name)] for name in names]
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
        """Return whether all are plain dtypes. Few: numpy walks a structure whenever it compares or prints
        one, shared parts each time."""
        foreign = next((part for part in parts if getattr(part, "dtype", None) is None), None)
        if foreign is not None:
            self._refuse(_name_of(foreign))
            return False
        self.fields = sum(part.fields for part in parts)
        self.nesting = 1 + max(part.nesting for part in parts)
        if self.fields > _MAX_FIELDS or self.nesting > _MAX_NESTING:
            raise _malformed("a dtype of too many fields")
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
            raise _malformed("an array's state")
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


def _malformed(what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{what} in a pickle is not as numpy writes it")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise _malformed("a size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _malformed("a field's name")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is int:
        return (_natural(value),)
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS:
        raise _malformed("a shape")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise _malformed("a shape")
    return value


def _dated(dtype: Dtype, state: Any) -> Dtype:
    """Return a datetime64 or timedelta64 of a unit; ``state`` is ``(None or {}, (unit, count, 1, 1))``."""
    if type(state) is not tuple or len(state) != 2 or state[0] or type(state[1]) is not tuple:
        raise _malformed("the unit of a dtype")
    unit, *numbers = state[1]
    name = unit.decode("ascii", "replace") if type(unit) is bytes else unit
    if type(name) is not str or name not in _UNITS or len(numbers) != 3 or numbers[1:] != [1, 1]:
        raise _malformed("the unit of a dtype")
    count = _natural(numbers[0])
    return dtype if name == "generic" else np.dtype(f"{dtype.kind}8[{count}{name}]")


def _array(shape: Any, dtype: Any, order: Any, data: Any) -> Array:
    """Return a view of ``data``, whose length has to be exactly what shape and dtype ask for."""
    if type(dtype) is not DtypePickle or dtype.dtype is None or order not in ("C", "F"):
        raise _malformed("an array")
    if type(data) not in (bytes, bytearray):
        raise _malformed("an array's data")
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
        raise _malformed("an array's dtype")
    return value.kind


def _dtype(args: tuple[Any, ...]) -> DtypePickle:
    """Make a dtype from a type string; byte order, fields and units come as its state."""
    text = args[0] if args else None
    if len(args) != 3 or not all(type(flag) in (bool, int) for flag in args[1:]):
        raise _malformed("a dtype")
    if type(text) is not str:
        return DtypePickle(None, "numpy.dtype of a class")
    if _TEXT.fullmatch(text) is None:
        return DtypePickle(None, f"numpy.dtype({text[:40]!r})")
    return DtypePickle(np.dtype(text))


def _reconstruct(args: tuple[Any, ...]) -> ArrayPickle | Ignored:
    if len(args) != 3 or args[1] != (0,) or args[2] not in (b"b", "b"):
        raise _malformed("an array")
    if args[0] is not _NDARRAY:
        return Ignored(getattr(args[0], "name", "a class that is no array"))
    return ArrayPickle()


def _from_buffer(args: tuple[Any, ...]) -> ArrayPickle:
    """Return what protocol 5 has for contiguous arrays."""
    if len(args) != 4:
        raise _malformed("an array")
    data, dtype, shape, order = args
    if getattr(dtype, "dtype", None) is None:
        return ArrayPickle(kind=_name_of(dtype))
    return ArrayPickle(_array(shape, dtype, order, data))


def _scalar(args: tuple[Any, ...]) -> Any:
    if len(args) != 2:
        raise _malformed("a scalar")
    dtype, data = args
    if getattr(dtype, "dtype", None) is None:
        return Ignored(_name_of(dtype))
    found = dtype.dtype
    if found.names is None and type(data) is bytes and len(data) == found.itemsize > 0:
        return np.frombuffer(data, found)[0]  # a long history of losses is made of these
    return _array((), dtype, "C", data).copy()[()]


_NDARRAY: Final = Constructor("numpy.ndarray")


def _globals() -> dict[tuple[str, str], Any]:
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


NUMPY_GLOBALS: Final = _globals()
"""Names that a pickle of arrays may use, as functions of this package."""
