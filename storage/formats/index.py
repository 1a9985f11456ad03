"""Checkpoint index: the common model of all formats. Tensors have chunks (boxes), chunks have byte ranges
in files.

Columns are numpy arrays, to handle millions of chunks. Torch-free. Loading, resharding, conversion, diff,
verify and the catalog all use a `CheckpointIndex`.

Ragged columns (shapes, boxes, CRCs) are a flat array plus a ``*_start`` array of n+1 positions: row i is
``values[start[i]:start[i + 1]]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.digests import SUM_BYTES, shown_digest
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32_combine
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import Int64, extent, row_products, starts

Path = tuple[str | int, ...]
"""Path of a flattened value in the nested state dict: dict keys (str) and list positions (int)."""

MAX_DIMENSIONS = 64
"""Maximum number of dimensions in torch."""

UNKNOWN = -1
"""Unknown payload offset or file size; open the record or file (foreign formats)."""


def itemsizes(dtype_codes: npt.NDArray[np.uint8]) -> Int64:
    """Return the bytes per element by row; 0 for unknown codes."""
    return _ITEMSIZES[dtype_codes]


_ITEMSIZES = np.zeros(256, dtype=np.int64)
for _dtype in dtypes.BY_CODE.values():
    _ITEMSIZES[_dtype.code] = _dtype.itemsize


def _int64(values: npt.ArrayLike) -> Int64:
    return np.asarray(values, dtype=np.int64)


_NO_INT64 = np.zeros(0, np.int64).copy
_NO_UINT8 = np.zeros(0, np.uint8).copy
_NO_UINT32 = np.zeros(0, np.uint32).copy
_NO_ROWS = np.zeros(1, np.int64).copy


@dataclass(frozen=True, eq=False)
class ObjectColumns:
    """Objects (values other than tensors), in any order.

    ``files``, ``offsets``, ``lengths`` locate torch.save blobs (``files`` is -1 for none), ``crcs`` are
    their CRC-32 (int64; UNKNOWN if not recorded). ``plain`` indexes ``values``, the msgpack encoding of
    plain data (see `dcp.storage.formats.plain`), -1 for blobs only. Equal values share a blob and an entry
    of ``values``.
    """

    fqns: Sequence[str] = ()
    files: Int64 = field(default_factory=_NO_INT64)
    offsets: Int64 = field(default_factory=_NO_INT64)
    lengths: Int64 = field(default_factory=_NO_INT64)
    crcs: Int64 = field(default_factory=_NO_INT64)
    plain: Int64 = field(default_factory=_NO_INT64)
    values: Sequence[bytes] = ()

    @classmethod
    def of_plain(cls, encoded: Mapping[str, bytes]) -> ObjectColumns:
        """Return objects of plain data from encodings by name."""
        numbers: dict[bytes, int] = {}
        plain = [numbers.setdefault(value, len(numbers)) for value in encoded.values()]
        nothing, unknown = np.zeros(len(plain), np.int64), np.full(len(plain), UNKNOWN, np.int64)
        columns = unknown, nothing, nothing, unknown, np.array(plain, np.int64)
        return cls(list(encoded), *columns, list(numbers))

    def __len__(self) -> int:
        return len(self.fqns)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Row by fully qualified name."""
        return dict(zip(self.fqns, range(len(self.fqns)), strict=True))


class WholeTensor(NamedTuple):
    """Tensor with contiguous C-ordered bytes at ``offset`` of file ``file``."""

    fqn: str
    dtype_code: int
    shape: tuple[int, ...]
    file: str
    offset: int


@dataclass(frozen=True, eq=False)
class CheckpointIndex:
    """Contents of a checkpoint and the location of the bytes.

    Tensors (n rows): ``fqns``, ``dtype_codes`` (`dcp.storage.formats.dtypes`),
    ``shape_start``/``shape_values``, ``requires_grad`` (0 or 1). ``stride_orders`` maps tensors with a
    dense source in another order than C to the dimensions from slowest to fastest; payloads are C-ordered
    unless ``payload_strides`` says otherwise.

    Chunks (c rows, grouped by tensor; tensor t has rows ``chunk_start[t]:chunk_start[t + 1]``):
    ``chunk_offsets`` and ``chunk_sizes`` are flat, ``ndim`` values per chunk, sliced by ``box_start``.
    ``chunk_files`` indexes ``files``. ``record_offsets``/``record_lengths`` locate the record (zip or raw
    payload), ``payload_offsets`` (absolute; UNKNOWN until the record is opened) and ``payload_lengths`` the
    payload. Tied tensors share payloads. ``crcs``/``crc_start`` hold the CRC-32 of each BLOCK_BYTES block
    of the payload, if recorded.

    ``payload_strides`` (torch.save files) has the few chunks that are not C-ordered: element ``(i, j,
    ...)`` is ``i * strides[0] + j * strides[1] + ...`` elements after the payload's start. Strides are not
    negative, and may be permuted, leave gaps or be 0 (expanded); ``payload_lengths`` then spans first to
    last element. ``record_crcs`` are CRC-32s of whole records, if recorded.

    ``digests`` are the sums of tensor digests (`dcp.storage.digests`), 16 bytes per tensor or empty; empty
    if none is known.

    ``planner_data`` maps an fqn to its path in the nested state dict, or is plain data of a custom planner,
    or None. `defer_planner_data` delays decoding to the first access, which may raise decoding errors.
    ``provenance`` and ``user`` are plain dicts. ``torch_metadata_crc`` is the CRC-32 of the `.metadata`
    published with this index, or None.
    """

    format: str
    fqns: Sequence[str] = ()
    dtype_codes: npt.NDArray[np.uint8] = field(default_factory=_NO_UINT8)
    shape_start: Int64 = field(default_factory=_NO_ROWS)
    shape_values: Int64 = field(default_factory=_NO_INT64)
    requires_grad: npt.NDArray[np.uint8] = field(default_factory=_NO_UINT8)
    chunk_start: Int64 = field(default_factory=_NO_ROWS)
    chunk_offsets: Int64 = field(default_factory=_NO_INT64)
    chunk_sizes: Int64 = field(default_factory=_NO_INT64)
    chunk_files: Int64 = field(default_factory=_NO_INT64)
    record_offsets: Int64 = field(default_factory=_NO_INT64)
    record_lengths: Int64 = field(default_factory=_NO_INT64)
    payload_offsets: Int64 = field(default_factory=_NO_INT64)
    payload_lengths: Int64 = field(default_factory=_NO_INT64)
    crc_start: Int64 = field(default_factory=_NO_ROWS)
    crcs: npt.NDArray[np.uint32] = field(default_factory=_NO_UINT32)
    files: Sequence[str] = ()
    file_sizes: Int64 = field(default_factory=_NO_INT64)
    objects: ObjectColumns = field(default_factory=ObjectColumns)
    stride_orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    payload_strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    record_crcs: Mapping[int, int] = field(default_factory=dict)
    digests: Sequence[bytes] = ()
    planner_data: Any = field(default_factory=NoneType)  # a class attribute would hide `__getattr__`
    provenance: Mapping[str, Any] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)
    torch_metadata_crc: int | None = None
    replaced_torch_metadata_crc: int | None = None

    @classmethod
    def of_whole_tensors(
        cls, format: str, tensors: Sequence[WholeTensor], file_sizes: Mapping[str, int], **others: Any
    ) -> CheckpointIndex:
        """Return the index of a format without chunks; ``file_sizes`` in bytes by name.

        ``others`` are further fields: records, checksums, values, nesting.

        Raises:
            CheckpointFormatError: As `check`.
        """
        number = {name: at for at, name in enumerate(file_sizes)}
        shapes = _int64([size for tensor in tensors for size in tensor.shape])
        codes = np.array([tensor.dtype_code for tensor in tensors], dtype=np.uint8)
        offsets = _int64([tensor.offset for tensor in tensors])
        lengths = _int64([min(math.prod(tensor.shape), 1 << 62) for tensor in tensors]) * itemsizes(codes)
        fields: dict[str, Any] = {
            "format": format,
            "fqns": [tensor.fqn for tensor in tensors],
            "dtype_codes": codes,
            "shape_start": starts([len(tensor.shape) for tensor in tensors]),
            "shape_values": shapes,
            "requires_grad": np.zeros(len(tensors), dtype=np.uint8),
            "chunk_start": np.arange(len(tensors) + 1, dtype=np.int64),
            "chunk_offsets": np.zeros_like(shapes),
            "chunk_sizes": shapes,
            "chunk_files": _int64([number[tensor.file] for tensor in tensors]),
            "record_offsets": offsets,
            "record_lengths": lengths,
            "payload_offsets": offsets,
            "payload_lengths": lengths,
            "crc_start": np.zeros(len(tensors) + 1, dtype=np.int64),
            "files": list(file_sizes),
            "file_sizes": _int64(list(file_sizes.values())),
            "planner_data": {tensor.fqn: (tensor.fqn,) for tensor in tensors},  # nothing is nested
        }
        index = cls(**(fields | others))
        index.check()
        return index

    def defer_planner_data(self, make: Callable[[], Any]) -> None:
        """Set a function that computes ``planner_data`` on first access."""
        del vars(self)["planner_data"]
        vars(self)["_make_planner_data"] = make

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            if name != "planner_data" or "_make_planner_data" not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            value = vars(self)["planner_data"] = vars(self)["_make_planner_data"]()
            return value

    @property
    def tensor_count(self) -> int:
        """Number of tensors."""
        return len(self.fqns)

    @property
    def chunk_count(self) -> int:
        """Number of chunks of all tensors."""
        return len(self.chunk_files)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Tensor row by fully qualified name."""
        return dict(zip(self.fqns, range(len(self.fqns)), strict=True))

    @cached_property
    def ndims(self) -> Int64:
        """Number of dimensions by tensor."""
        return np.diff(self.shape_start)

    @cached_property
    def chunk_tensors(self) -> Int64:
        """Tensor row by chunk."""
        return np.repeat(np.arange(len(self.fqns), dtype=np.int64), np.diff(self.chunk_start))

    @cached_property
    def box_start(self) -> Int64:
        """Position of each chunk's box in ``chunk_offsets`` and ``chunk_sizes``."""
        return starts(np.diff(self.shape_start)[self.chunk_tensors])

    @cached_property
    def itemsizes(self) -> Int64:
        """Bytes per element by tensor."""
        return itemsizes(self.dtype_codes)

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Return the global shape of a tensor row."""
        return tuple(self.shape_values[self.shape_start[tensor] : self.shape_start[tensor + 1]].tolist())

    def own_name(self, tensor: int) -> str:
        """Return the stored name of a tensor row; of joined checkpoints, the name in its own checkpoint."""
        own = getattr(self.fqns, "own_name", None)
        name: str = self.fqns[tensor] if own is None else own(tensor)
        return name

    def dtype(self, tensor: int) -> dtypes.Dtype:
        """Return the element type of a tensor row."""
        return dtypes.BY_CODE[int(self.dtype_codes[tensor])]

    def box(self, chunk: int) -> Box:
        """Return the box of a chunk row in its tensor."""
        begin, end = self.box_start[chunk], self.box_start[chunk + 1]
        return Box(tuple(self.chunk_offsets[begin:end].tolist()), tuple(self.chunk_sizes[begin:end].tolist()))

    def chunks(self, tensor: int) -> range:
        """Return the chunk rows of a tensor row."""
        return range(int(self.chunk_start[tensor]), int(self.chunk_start[tensor + 1]))

    def block_crcs(self, chunk: int) -> npt.NDArray[np.uint32]:
        """Return the CRC-32 of each block of a chunk's payload; empty if not recorded."""
        return self.crcs[self.crc_start[chunk] : self.crc_start[chunk + 1]]

    def payload_crc(self, chunk: int) -> int | None:
        """Return the CRC-32 of a chunk's payload; None if unknown."""
        blocks = self.block_crcs(chunk).tolist()
        size = int(self.payload_lengths[chunk])
        if not blocks:
            fills = size == self.record_lengths[chunk] and chunk in self.record_crcs
            return self.record_crcs[chunk] if fills else 0 if not size else None
        whole = 0
        for number, crc in enumerate(blocks):
            whole = crc32_combine(whole, crc, min(BLOCK_BYTES, size - number * BLOCK_BYTES))
        return whole

    def digest(self, tensor: int) -> str | None:
        """Return the shown digest of a tensor row; None if unknown."""
        total = self.digests[tensor] if len(self.digests) else b""
        return shown_digest(total, self.dtype(tensor).name, self.shape(tensor)) if total else None

    @property
    def tensor_bytes(self) -> int:
        """Payload bytes of all chunks; shared payloads count once per tensor."""
        return int(self.payload_lengths.sum())

    def check(self) -> None:
        """Check the consistency of all columns.

        Run on everything decoded from bytes before memory is allocated or files are read: column lengths,
        known dtypes, non-negative sizes, boxes inside tensors, payload length (volume x itemsize, or extent
        of strides), payload inside record, record inside file (if sizes are known), CRC counts, file
        numbers, and plain file names.

        Raises:
            CheckpointFormatError: If columns are inconsistent.
        """
        for is_wrong, problem in chain(_tensor_rules(self), _chunk_rules(self), _object_rules(self)):
            if is_wrong:
                raise CheckpointFormatError(f"the checkpoint index is inconsistent: {problem}")


_Rules = Iterator[tuple[bool | np.bool_, str]]
"""Rules as (violated, message). A rule may rely on earlier rules."""


def _tensor_rules(index: CheckpointIndex) -> _Rules:
    tensors, chunks = len(index.fqns), len(index.chunk_files)
    columns = {"dtype_codes": tensors, "requires_grad": tensors, "file_sizes": len(index.files)}
    columns |= dict.fromkeys(
        ("record_offsets", "record_lengths", "payload_offsets", "payload_lengths"), chunks
    )
    for name, rows in columns.items():
        found = len(getattr(index, name))
        yield found != rows, f"column {name} has {found} rows, expected {rows}"
    for name, rows, total in (
        ("shape_start", tensors, len(index.shape_values)),
        ("chunk_start", tensors, chunks),
        ("crc_start", chunks, len(index.crcs)),
    ):
        begins = getattr(index, name)
        is_wrong = len(begins) != rows + 1 or begins[0] != 0 or begins[-1] != total
        yield is_wrong or (np.diff(begins) < 0).any(), f"positions {name} do not ascend from 0 to {total}"
    # without `position`, which only loads need
    yield len(set(index.fqns)) != tensors, "two tensors have the same name"
    yield not np.isin(index.dtype_codes, list(dtypes.BY_CODE)).all(), "unknown dtype code"
    yield (index.shape_values < 0).any(), "a tensor has a negative size"
    volumes = row_products(index.shape_values.astype(np.float64), index.shape_start)
    # in float64, because int64 would overflow
    yield (volumes * itemsizes(index.dtype_codes) > 2.0**62).any(), "a tensor has more than 2**62 bytes"
    is_wrong = len(index.digests) not in (0, tensors) or not {*map(len, index.digests)} <= {0, SUM_BYTES}
    yield is_wrong, f"tensor digests must have {SUM_BYTES} bytes, one for each tensor"


def _chunk_rules(index: CheckpointIndex) -> _Rules:
    for name in index.files:
        is_wrong = name in ("", ".", "..") or "/" in name or "\\" in name or "\x00" in name
        yield is_wrong, f"file name {name!r} has a path separator or NUL, or is empty or reserved"
    yield len(set(index.files)) != len(index.files), "two files have the same name"
    box_start, sizes, files = index.box_start, index.chunk_sizes, index.chunk_files
    is_wrong = not len(index.chunk_offsets) == len(sizes) == box_start[-1]
    yield is_wrong, "boxes have the wrong number of dimensions"
    if not len(files):
        return
    counts = np.diff(box_start)
    rows = np.repeat(index.shape_start[index.chunk_tensors] - box_start[:-1], counts) + np.arange(
        box_start[-1]
    )
    limits = index.shape_values[rows]
    yield (index.chunk_offsets < 0).any() or (sizes < 0).any(), "a chunk has negative offsets or sizes"
    is_outside = (index.chunk_offsets > limits) | (sizes > limits - index.chunk_offsets)
    yield is_outside.any(), "a chunk exceeds its tensor"
    element_bytes = itemsizes(index.dtype_codes)[index.chunk_tensors]
    # float64 first: a forged shape could overflow int64 and pass
    volumes = row_products(sizes.astype(np.float64), box_start)
    yield (volumes * element_bytes > 2.0**62).any(), "a chunk has more than 2**62 bytes"
    expected = row_products(sizes, box_start) * element_bytes
    for chunk, strides in index.payload_strides.items():
        yield not 0 <= chunk < len(files), "strides refer to an unknown chunk"
        box = index.box(chunk).sizes
        is_wrong = len(strides) != len(box) or min(strides, default=0) < 0
        yield is_wrong, "strides are negative, or have another number of dimensions than the chunk"
        length = extent(box, strides) * int(element_bytes[chunk])
        yield length >= 1 << 62, "a chunk has more than 2**62 bytes"
        expected[chunk] = length
    yield (index.payload_lengths != expected).any(), "a payload's length does not match its chunk"
    yield (files < 0).any() or (files >= len(index.files)).any(), "a chunk refers to an unknown file"
    begins, ends = index.record_offsets, index.record_offsets + index.record_lengths
    yield (begins < 0).any() or (index.record_lengths < 0).any(), "a record has a negative range"
    yield (ends < begins).any(), "a record's range overflows int64"
    payloads = index.payload_offsets
    is_outside = (payloads < begins) | (index.payload_lengths > ends - payloads)
    yield (is_outside & (payloads != UNKNOWN)).any(), "a payload exceeds its record"
    totals = index.file_sizes[files]
    yield ((totals != UNKNOWN) & (ends > totals)).any(), "a record exceeds its file"
    counts, blocks = np.diff(index.crc_start), -(-index.payload_lengths // BLOCK_BYTES)
    yield ((counts != 0) & (counts != blocks)).any(), "a chunk has the wrong number of block checksums"
    for row, crc in index.record_crcs.items():
        is_wrong = not (0 <= row < len(files) and 0 <= crc < 1 << 32)
        yield is_wrong, "a record's checksum refers to an unknown chunk, or is not a CRC-32"


def _object_rules(index: CheckpointIndex) -> _Rules:
    objects, names = index.objects, set(index.objects.fqns)
    for name in ("files", "offsets", "lengths", "crcs", "plain"):
        yield len(getattr(objects, name)) != len(objects.fqns), f"object column {name} has the wrong length"
    yield len(names) != len(objects.fqns), "two objects have the same name"
    yield not names.isdisjoint(index.fqns), "an object and a tensor have the same name"
    if not names:
        return
    files, plain = objects.files, objects.plain
    yield ((files < -1) | (files >= len(index.files))).any(), "an object refers to an unknown file"
    yield ((plain < -1) | (plain >= len(objects.values))).any(), "an object refers to an unknown value"
    stored = files >= 0
    yield ((plain < 0) & ~stored).any(), "an object has neither a value nor a record"
    begins, lengths = objects.offsets[stored], objects.lengths[stored]
    yield (begins < 0).any() or (lengths < 0).any(), "an object has a negative range"
    totals, ends = index.file_sizes[files[stored]], begins + lengths
    is_outside = ((totals != UNKNOWN) & (ends > totals)) | (ends < 0)
    yield is_outside.any(), "an object exceeds its file"
