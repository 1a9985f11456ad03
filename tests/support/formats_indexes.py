"""Indexes for tests: one by hand, and any number made by hypothesis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64, ObjectColumns, starts
from dcp.storage.formats.plain import encode_plain


def int64(values: list[int]) -> Int64:
    """A column."""
    return np.array(values, dtype=np.int64)


def small_index(**changes: Any) -> CheckpointIndex:
    """Two tensors (one in two chunks, one a scalar), two objects that share a value, nested planner data."""
    fields: dict[str, Any] = {
        "format": "dcp",
        "fqns": ["model.weight", "step"],
        "dtype_codes": np.array([4, 9], dtype=np.uint8),
        "shape_start": int64([0, 2, 2]),
        "shape_values": int64([4, 6]),
        "requires_grad": np.array([1, 0], dtype=np.uint8),
        "chunk_start": int64([0, 2, 3]),
        "chunk_offsets": int64([0, 0, 2, 0]),
        "chunk_sizes": int64([2, 6, 2, 6]),
        "chunk_files": int64([0, 1, 0]),
        "record_offsets": int64([0, 0, 500]),
        "record_lengths": int64([480, 480, 450]),
        "payload_offsets": int64([220, 220, 716]),
        "payload_lengths": int64([24, 24, 8]),
        "crc_start": int64([0, 1, 2, 3]),
        "crcs": np.array([1, 0xFFFFFFFF, 77], dtype=np.uint32),
        "files": ["__0_0.3f9c2a1b.distcp", "__1_0.3f9c2a1b.distcp"],
        "file_sizes": int64([1500, 480]),
        "objects": ObjectColumns(
            fqns=["optim.lr", "optim.eps"],
            files=int64([0, -1]),
            offsets=int64([1000, 0]),
            lengths=int64([300, 0]),
            crcs=int64([5, UNKNOWN]),
            plain=int64([0, 0]),
            values=[encode_plain(0.001) or b""],
        ),
        "stride_orders": {0: (1, 0)},
        "planner_data": {"model.weight": ("model", "weight"), "step": ("step",), "optim.lr": ("optim", 0)},
        "provenance": {"save_id": "3f9c2a1b", "world_size": 2},
        "user": {"tags": ("a", "b"), "loss": 0.5},
        "torch_metadata_crc": 123456789,
    }
    return CheckpointIndex(**(fields | changes))


_sizes = st.lists(st.integers(0, 2**40) | st.integers(0, 9), max_size=5)
_names = st.text(min_size=1, max_size=30)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def indexes(draw: st.DrawFn) -> CheckpointIndex:
    """Any consistent index: 0-d and empty tensors, unknown payload offsets, with and without CRCs."""
    names = draw(st.lists(_names, max_size=8, unique=True))
    tensors = draw(st.integers(0, len(names)))
    files = draw(st.lists(st.from_regex(r"\A[a-zé0-9_]{1,9}\Z"), min_size=1, max_size=4, unique=True))
    builder = _Builder(draw, len(files))
    for _ in range(tensors):
        builder.add_tensor()
    return CheckpointIndex(
        format=draw(st.sampled_from(["dcp", "torch_dcp"])),
        fqns=names[:tensors],
        files=files,
        file_sizes=int64([draw(st.sampled_from([2**62, UNKNOWN])) for _ in files]),
        objects=_objects(draw, names[tensors:], len(files)),
        planner_data=draw(
            st.none() | st.dictionaries(_names, st.lists(_names | st.integers()).map(tuple)) | _plain
        ),
        provenance=draw(st.dictionaries(st.text(max_size=5), _plain, max_size=3)),
        user=draw(st.dictionaries(st.text(max_size=5), _plain, max_size=3)),
        torch_metadata_crc=draw(st.none() | st.integers(0, 2**32 - 1)),
        replaced_torch_metadata_crc=draw(st.none() | st.integers(0, 2**32 - 1)),
        **builder.columns(),
    )


class _Builder:
    def __init__(self, draw: st.DrawFn, files: int) -> None:
        self._draw = draw
        self._files = files
        self._codes: list[int] = []
        self._shapes: list[list[int]] = []
        self._grads: list[int] = []
        self._chunk_counts: list[int] = []
        self._boxes: list[tuple[list[int], list[int]]] = []
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._crcs: list[list[int]] = []
        self._orders: dict[int, tuple[int, ...]] = {}

    def add_tensor(self) -> None:
        draw = self._draw
        dtype = dtypes.BY_CODE[draw(st.sampled_from(sorted(dtypes.BY_CODE)))]
        shape = draw(_sizes)
        if draw(st.booleans()):
            self._orders[len(self._codes)] = tuple(draw(st.permutations(range(len(shape)))))
        self._codes.append(dtype.code)
        self._shapes.append(shape)
        self._grads.append(draw(st.integers(0, 1)))
        self._chunk_counts.append(draw(st.integers(0, 3)))
        for _ in range(self._chunk_counts[-1]):
            self._add_chunk(shape, dtype.itemsize)

    def _add_chunk(self, shape: list[int], itemsize: int) -> None:
        draw = self._draw
        offsets = [draw(st.integers(0, size)) for size in shape]
        sizes = [
            draw(st.integers(0, min(size - offset, 64))) for size, offset in zip(shape, offsets, strict=True)
        ]
        length = math.prod(sizes) * itemsize
        record, head, tail = draw(st.integers(0, 2**50)), draw(st.integers(0, 600)), draw(st.integers(0, 600))
        payload = record + head if draw(st.booleans()) else UNKNOWN
        self._boxes.append((offsets, sizes))
        self._rows.append(
            (draw(st.integers(0, self._files - 1)), record, head + length + tail, payload, length)
        )
        blocks = -(-length // BLOCK_BYTES) if length < 1 << 30 and draw(st.booleans()) else 0
        self._crcs.append([draw(st.integers(0, 2**32 - 1)) for _ in range(blocks)])

    def columns(self) -> dict[str, Any]:
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        return {
            "dtype_codes": np.array(self._codes, dtype=np.uint8),
            "shape_start": starts([len(shape) for shape in self._shapes]),
            "shape_values": int64([size for shape in self._shapes for size in shape]),
            "requires_grad": np.array(self._grads, dtype=np.uint8),
            "chunk_start": starts(self._chunk_counts),
            "chunk_offsets": int64([offset for box in self._boxes for offset in box[0]]),
            "chunk_sizes": int64([size for box in self._boxes for size in box[1]]),
            "chunk_files": rows[:, 0],
            "record_offsets": rows[:, 1],
            "record_lengths": rows[:, 2],
            "payload_offsets": rows[:, 3],
            "payload_lengths": rows[:, 4],
            "crc_start": starts([len(crcs) for crcs in self._crcs]),
            "crcs": np.array([crc for crcs in self._crcs for crc in crcs], dtype=np.uint32),
            "stride_orders": self._orders,
        }


def _objects(draw: st.DrawFn, fqns: list[str], files: int) -> ObjectColumns:
    values = [encode_plain(value) or b"\xc0" for value in draw(st.lists(_plain, max_size=3))]
    plain = [draw(st.integers(-1, len(values) - 1)) for _ in fqns]
    stored = [draw(st.integers(0 if row < 0 else -1, files - 1)) for row in plain]
    return ObjectColumns(
        fqns=fqns,
        files=int64(stored),
        offsets=int64([draw(st.integers(0, 2**50)) for _ in fqns]),
        lengths=int64([draw(st.integers(0, 2**40)) for _ in fqns]),
        crcs=int64([draw(st.integers(-1, 2**32 - 1)) for _ in fqns]),
        plain=int64(plain),
        values=values,
    )


def assert_same_index(found: CheckpointIndex, expected: CheckpointIndex) -> None:
    """Every column and every section, with the types of columns."""
    for name in CheckpointIndex.__dataclass_fields__:
        if name != "objects":
            _assert_same(getattr(found, name), getattr(expected, name), name)
    for name in ObjectColumns.__dataclass_fields__:
        _assert_same(getattr(found.objects, name), getattr(expected.objects, name), f"objects.{name}")


def _assert_same(found: Any, expected: Any, name: str) -> None:
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and np.array_equal(found, expected), name
    elif name.endswith(("fqns", "files", "values")):
        assert list(found) == list(expected), name
    else:
        assert repr(found) == repr(expected), name  # repr: NaN equals itself, and types are told apart
