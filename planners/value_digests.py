"""Digests of values that are no plain data, so that ranks can compare them as they compare tensors.

What equal values have in common, a pickle has not: it tells which of their parts are one object. So a value
is taken apart here, as far as it is made of containers, tensors, numpy's arrays and the library's values.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import marshal
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Final

import numpy as np
import torch

from dcp.planners.by_value import by_value
from dcp.planners.digest import digest_bytes, digest_tensors
from dcp.storage.formats.torch.python_values import is_harmless_leaf

__all__ = ["digest_value"]

_MAX_DEPTH: Final = 256
_SEQUENCES: Final = (list, tuple, deque, torch.Size)
_SETS: Final = (set, frozenset)
_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)
_NUMBERS: Final = frozenset((type(None), bool, int, float))
_ATOMS: Final = (*_NUMBERS, complex, str)
_NAMED: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NotComparableError(Exception):
    """Nothing is known of what equality means for it."""


def digest_value(value: Any) -> int:
    """A digest that equal values have in common; 0, for "not known", where ``value`` has an object of a class
    that is neither a dataclass nor an enum nor the library's, numpy's or torch's."""
    try:
        return digest_bytes(_described(by_value(value), 0))
    except (_NotComparableError, AttributeError, RuntimeError, TypeError, ValueError):  # of its own code, too
        return 0


def _described(value: Any, depth: int) -> bytes:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise _NotComparableError
    if kind in (list, tuple) and _NUMBERS.issuperset(map(type, value)):
        parts = [marshal.dumps(value, 0)]  # the version that tells no references; quick, for long histories
    elif kind in _SEQUENCES:
        parts = [_described(item, depth + 1) for item in value]
    elif kind in _SETS:
        parts = sorted(_described(item, depth + 1) for item in value)
    elif kind in _DICTS:
        parts = [_described(part, depth + 1) for item in value.items() for part in item]
    elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq:  # type: ignore[attr-defined]
        fields = [field.name for field in dataclasses.fields(kind) if field.compare]
        parts = [_described(getattr(value, name), depth + 1) for name in fields]
    else:
        parts = [_leaf(value, kind)]
    name = f"{kind.__module__}.{kind.__qualname__}"
    return b"%s %d:" % (name.encode(), len(parts)) + b"".join(b"%d " % len(part) + part for part in parts)


def _leaf(value: Any, kind: type) -> bytes:
    if kind in (bytes, bytearray):
        return b"%d %d" % (len(value), digest_bytes(value))
    if kind is io.BytesIO:
        return _leaf(value.getvalue(), bytes)
    if isinstance(value, torch.Generator):
        return _leaf(bytes(value.get_state().numpy()), bytes)
    if kind in (torch.Tensor, torch.nn.Parameter):
        plain = value.detach().resolve_conj().resolve_neg()
        return repr((plain.dtype, tuple(plain.shape), int(digest_tensors([plain], "full")[0]))).encode()
    if isinstance(value, np.ndarray | np.generic) and is_harmless_leaf(value):
        array = np.ascontiguousarray(value)
        return repr((array.dtype.str, np.shape(value), digest_bytes(array.tobytes()))).encode()
    if isinstance(value, enum.Enum):
        return value.name.encode("utf-8", "surrogatepass")
    if kind in _ATOMS or isinstance(value, _NAMED) or is_harmless_leaf(value):
        return repr(value).encode("utf-8", "surrogatepass")
    raise _NotComparableError
