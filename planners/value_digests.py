"""Digests of tensors and values, for comparing replicas between ranks.

A tensor digest has 64 bits over the logical bytes in C order and detects accidents, not forgeries. 0 means
unknown. Host memory is read once, by CRC-32. Large tensors of other devices are reduced on the device:
blocks of 64 KiB are multiplied by fixed random numbers and summed. Both kinds are not comparable
(`is_made_on_device`).

Pickles of equal values may differ because of shared objects. Values are therefore decomposed into
containers, tensors, arrays and known types; objects of other classes into their pickle state.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import hashlib
import io
import marshal
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from isal.isal_zlib import adler32, crc32

from dcp.planners.by_value import by_value
from dcp.storage.engine.memory import view
from dcp.storage.formats.torch.python_values import is_harmless_leaf

ReplicaCheck = Literal["sampled", "full", "off"]

WHOLE_LIMIT_BYTES = 64 << 10
"""Maximum size of tensors copied whole from a device, and of the samples of larger ones with ``sampled``."""
SAMPLE_BYTES = 4 << 10
SAMPLES = WHOLE_LIMIT_BYTES // SAMPLE_BYTES

_CRC_BLOCK_BYTES: Final = 1 << 20
"""Block size of CRC-32s that Adler-32 combines, because Adler-32 is slower."""
_SUM_BLOCK_BYTES: Final = 64 << 10
_SUMMED_BYTES: Final = 32 << 20
"""Bytes multiplied at a time; products take four times the memory of the device."""
_WORD_BYTES: Final = 4
_FROM_DEVICE: Final = np.uint64(0xFFFF << 48)
"""Digests above were made on a device; Adler-32 is smaller."""


def digest_bytes(data: Any) -> int:
    """Return the digest of a buffer, never 0."""
    return (adler32(data) << 32 | crc32(data)) or 1


def is_made_on_device(digest: int) -> bool:
    """Return True for digests of large tensors made on an accelerator."""
    return digest >= int(_FROM_DEVICE)


def _digest_contiguous(tensor: torch.Tensor) -> int:
    data = view(tensor.data_ptr(), tensor.nbytes)
    if tensor.nbytes <= WHOLE_LIMIT_BYTES:
        return digest_bytes(data)
    blocks = range(0, tensor.nbytes, _CRC_BLOCK_BYTES)
    return digest_bytes(np.array([crc32(data[at : at + _CRC_BLOCK_BYTES]) for at in blocks], "<u4"))


def _sample_starts(nbytes: int) -> list[int]:
    """Return sample positions: head, tail and evenly between, at multiples of 16."""
    span = nbytes - SAMPLE_BYTES
    return [span * number // (SAMPLES - 1) // 16 * 16 for number in range(SAMPLES - 1)] + [span]


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sampled elements in a contiguous tensor on the device."""
    itemsize, length = tensor.itemsize, SAMPLE_BYTES // tensor.itemsize
    places = [start // itemsize for start in _sample_starts(tensor.nbytes)]
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.cat([flat[place : place + length] for place in places])
    positions = np.concatenate([np.arange(place, place + length) for place in places])
    index = np.unravel_index(positions, tuple(tensor.shape))
    return tensor[tuple(torch.from_numpy(part).to(tensor.device) for part in index)]


def _digest_host(tensor: torch.Tensor, *, full: bool) -> int:
    if not full and tensor.nbytes > WHOLE_LIMIT_BYTES:
        if tensor.is_contiguous():
            data = view(tensor.data_ptr(), tensor.nbytes)
            return digest_bytes(
                b"".join(data[at : at + SAMPLE_BYTES] for at in _sample_starts(tensor.nbytes))
            )
        tensor = _sampled(tensor)
    return _digest_contiguous(tensor if tensor.is_contiguous() else tensor.contiguous())


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def block_sums(data: torch.Tensor) -> torch.Tensor:
    """Return for each whole block of ``data`` the sum of words times random numbers modulo 2**64, followed
    by the remaining bytes, as flat bytes.

    Different blocks have equal sums with a probability of at most 2**-32: words have 32 bits, factors 64.
    """
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = data.numel() // _SUM_BLOCK_BYTES * _SUM_BLOCK_BYTES
    factors = _factors(data.device)
    sums = [
        (part.view(torch.int32).view(-1, len(factors)) * factors).sum(1)
        for part in torch.split(data[:whole], _SUMMED_BYTES)
    ]
    return torch.cat([torch.cat(sums).view(torch.uint8), data[whole:]])


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> torch.Tensor:
    """Return a random number per word of a block, the same in every process."""
    numbers = np.random.PCG64(0).random_raw(_SUM_BLOCK_BYTES // _WORD_BYTES).view(np.int64)
    return torch.from_numpy(numbers).to(device)


def digest_tensors(tensors: Sequence[torch.Tensor], check: ReplicaCheck = "full") -> npt.NDArray[np.uint64]:
    """Return a digest per tensor: of all bytes with ``full``, of samples with ``sampled``, 0 with ``off``.

    Tensors of other devices are reduced there, and copied together.
    """
    digests = np.zeros(len(tensors), np.uint64)
    if check == "off":
        return digests
    full = check == "full"
    elsewhere: dict[torch.device, list[int]] = defaultdict(list)
    with torch.no_grad():
        for row, tensor in enumerate(tensors):
            if tensor.is_cpu:
                digests[row] = _digest_host(tensor, full=full)
            elif tensor.nbytes:
                elsewhere[tensor.device].append(row)
            else:
                digests[row] = digest_bytes(b"")
        for rows in elsewhere.values():
            parts = []
            for row in rows:  # select the bytes to copy to the host
                tensor, is_small = tensors[row], tensors[row].nbytes <= WHOLE_LIMIT_BYTES
                data = _flat_bytes(tensor if is_small or full else _sampled(tensor))
                parts.append(block_sums(data) if full and not is_small else data)
            host = torch.cat(parts).cpu()
            for row, part in zip(rows, torch.split(host, [part.numel() for part in parts]), strict=True):
                digests[row] = _digest_contiguous(part)
                if full and tensors[row].nbytes > WHOLE_LIMIT_BYTES:
                    digests[row] |= _FROM_DEVICE
    return digests


NOT_COMPARABLE: Final = (1 << 64) - 1
"""Digest of values without comparable state; larger than any other digest."""

_MAX_DEPTH: Final = 256
_MAX_BYTES: Final = 256
_OPEN: Final = b"in "
"""Marker of an open container before its depth."""
_SEQUENCES: Final = (list, tuple, deque, torch.Size)
_SETS: Final = (set, frozenset)
_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)
_CONTAINERS: Final = frozenset((*_SEQUENCES, *_SETS, *_DICTS))
_QUICK: Final = frozenset((type(None), bool, int, float, str))
_ATOMS: Final = (*_QUICK, complex)
_GLOBALS: Final = (type, types.FunctionType, types.BuiltinFunctionType)
_NAMED: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)

_NO_REFERENCES: Final = 0
"""Version of marshal that does not record shared objects."""

_PICKLE_PROTOCOL: Final = 2
"""Pickle protocol of torch.save."""


def digest_value(value: Any) -> int:
    """Return a digest equal for values of equal state; NOT_COMPARABLE for recursive values and objects
    without pickle state.
    """
    try:
        return digest_bytes(_Describer().described(by_value(value), 0))
    except Exception:  # noqa: BLE001 - the value's own code may raise anything; the save names the value
        return NOT_COMPARABLE


class _Describer:
    """Description of values as bytes, equal for equal state."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, bytes]] = {}
        self._open = 0
        """Objects other than containers that are being described."""

    def described(self, value: Any, depth: int) -> bytes:
        """Describe a value; containers and objects once."""
        kind = type(value)
        if depth > _MAX_DEPTH:
            raise RecursionError
        if kind in (list, tuple) and _QUICK.issuperset(map(type, value)):
            return _named(kind, [marshal.dumps(value, _NO_REFERENCES)])  # for long histories
        if isinstance(value, np.ma.MaskedArray):
            whole = (value.filled(), np.ma.getmaskarray(value), value.fill_value)
            return _named(kind, [self.described(part, depth + 1) for part in whole])
        has_items = kind in _CONTAINERS or _is_equal_by_fields(value, kind)
        if not has_items and (leaf := _leaf(value, kind)) is not None:
            return _named(kind, [leaf])
        if id(value) in self._seen:
            known = self._seen[id(value)][1]
            if known.startswith(_OPEN) and not self._open:  # contains itself directly, not through an object
                raise RecursionError
            return known
        # for references from items or state of the value
        self._seen[id(value)] = (value, b"%s%d" % (_OPEN, depth) if has_items else b"%d" % self._open)
        self._open += kind not in _CONTAINERS
        parts = [self.described(part, depth + 1) for part in _held(value, kind, has_items)]
        if kind in _SETS:
            parts.sort()
        elif kind in _DICTS:
            parts += self._items(value, kind, depth)
        self._open -= kind not in _CONTAINERS
        found = _named(kind, parts)
        self._seen[id(value)] = (value, found)
        return found

    def _items(self, value: Any, kind: type, depth: int) -> list[bytes]:
        """Describe the items of a dict; the order counts only for an OrderedDict."""
        if set(map(type, value)) == {str} and _QUICK.issuperset(map(type, value.values())):
            items = value.items() if kind is OrderedDict else sorted(value.items())
            return [marshal.dumps(list(chain.from_iterable(items)), _NO_REFERENCES)]
        pairs = [
            (self.described(key, depth + 1), self.described(item, depth + 1)) for key, item in value.items()
        ]
        return list(chain.from_iterable(pairs if kind is OrderedDict else sorted(pairs)))


def _named(kind: type, parts: Sequence[bytes]) -> bytes:
    """Join the parts of a description, hashed if long."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    whole = b"%s %d:" % (name.encode(), len(parts)) + b"".join(b"%d " % len(part) + part for part in parts)
    return whole if len(whole) <= _MAX_BYTES else hashlib.blake2b(whole, digest_size=32).digest()


def _held(value: Any, kind: type, has_items: bool) -> Iterator[Any]:
    """Yield the items of a container other than a dict; of an object its pickle parts: function, arguments,
    state, items.
    """
    if kind is deque:
        yield value.maxlen
    elif kind is defaultdict:
        yield value.default_factory
    if kind in (*_SEQUENCES, *_SETS):
        yield from value
    elif has_items and kind not in _DICTS:
        yield from _compared(value, kind)
    elif not has_items:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(_PICKLE_PROTOCOL) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            yield reduced
            return
        function, args, state, items, entries = (*reduced, None, None, None)[:5]
        yield [function, args, state, list(items or ()), [part for pair in entries or () for part in pair]]


def _is_equal_by_fields(value: Any, kind: type) -> bool:
    is_one = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.eq  # type: ignore[attr-defined]
    return is_one and not isinstance(value, (*_SEQUENCES, *_SETS, dict))


def _compared(value: Any, kind: type) -> Iterator[Any]:
    """Yield the compared fields of a dataclass, and attributes other than cached properties."""
    fields = dataclasses.fields(kind)
    yield from (getattr(value, field.name) for field in fields if field.compare)
    others = getattr(value, "__dict__", {}).keys() - {field.name for field in fields}
    for name in sorted(others):
        if not isinstance(getattr(kind, name, None), cached_property):
            yield name
            yield vars(value)[name]


def _leaf(value: Any, kind: type) -> bytes | None:
    """Describe a simple value; None for objects with pickle state."""
    if kind in (bytes, bytearray):
        return b"%d %d" % (len(value), digest_bytes(value))
    if kind is io.BytesIO:
        return _leaf(value.getvalue(), bytes)
    if isinstance(value, torch.Generator):
        return _leaf(bytes(value.get_state().numpy()), bytes)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if is_plain and not (value.is_quantized or value.is_nested):
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        return repr((plain.dtype, tuple(plain.shape), int(digest_tensors([plain])[0]))).encode()
    if isinstance(value, torch.UntypedStorage | torch.TypedStorage):  # the pickle would contain an address
        data = torch.empty(0, dtype=torch.uint8).set_(getattr(value, "_untyped_storage", value).cpu())
        return _leaf(data, torch.Tensor)
    if isinstance(value, np.ndarray | np.generic) and is_harmless_leaf(value):
        array = np.ascontiguousarray(value)
        return repr((array.dtype, np.shape(value), digest_bytes(array.tobytes()))).encode()
    if isinstance(value, enum.Enum):
        return value.name.encode("utf-8", "surrogatepass")
    if kind in _ATOMS or isinstance(value, _NAMED) or is_harmless_leaf(value):
        return repr(value).encode("utf-8", "surrogatepass")
    is_global = isinstance(value, _GLOBALS) and isinstance(getattr(value, "__self__", sys), types.ModuleType)
    return f"{value.__module__}.{value.__qualname__}".encode() if is_global else None
