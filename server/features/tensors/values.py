"""Values of a tensor or slice: files, grids, and statistics. Imports numpy."""

from __future__ import annotations

import io
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.conversion.layout import Copies, Literals, TargetLayout
from dcp.conversion.layout import Literal as LiteralBytes
from dcp.inspection.values.elements import decode, is_opaque, stored_dtype
from dcp.inspection.values.statistics import statistics_of_row
from dcp.inspection.values.tensor_reading import Slices, TensorReader, select
from dcp.server.catalog.inputs import clean_text
from dcp.server.core.data.access import OpenCheckpoint
from dcp.server.core.data.planned import ArrayBody, PlannedBody
from dcp.server.core.data.responses import Body
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.tensors import MeasuredTensor, TensorGrid, statistics_json
from dcp.storage.engine.read import ReadEngine
from dcp.storage.formats import dtypes
from dcp.storage.formats.dtypes import CASTABLE, Dtype
from dcp.storage.formats.safetensors import HeaderTensor, header_order, safetensors_header

_FLOAT32: Final = dtypes.BY_NAME["float32"]
_BLOCK: Final = 1 << 21
"""Elements read at a time."""
_READ: Final = 1 << 26
"""Maximum number of elements to read; of larger tensors, a part of each cell is read."""
_MAX_BYTES: Final = 64 << 20
_BINS: Final = 64
_DIGITS: Final = 7
"""Digits of a number in an answer, as float32 has them."""

Floats = npt.NDArray[np.float64]


# -- files ---------------------------------------------------------------------------------------------------


def plan_tensor(
    opened: OpenCheckpoint, fqn: str, slices: Slices | None, to: str
) -> tuple[Body, str, tuple[int, ...]]:
    """Return the file of the tensor ``fqn``, its stored dtype, and its shape.

    A .npy file has float32 elements for dtypes unknown to numpy.

    Raises NotFoundError for an unknown tensor, UnprocessableError for dtypes that the format lacks, and
    PlanError for invalid slices.
    """
    index = opened.index
    row = opened.row(fqn)
    dtype = index.dtype(row)
    shape = select(index.shape(row), slices, fqn).shape
    target = dtype if to == "safetensors" else _npy_dtype(dtype)
    head = _npy_head(target, shape) if to == "npy" else _safetensors_head(fqn, dtype, shape)
    is_castable = target == dtype or {dtype.code, target.code} <= CASTABLE
    body: Body
    if slices is None and is_castable:
        size = math.prod(shape) * target.itemsize
        copies = Copies.of_tensors(index, [row], [target.code], [0], [len(head)], [size])
        literals = Literals.of([LiteralBytes(0, 0, head)])
        layout = TargetLayout(["tensor"], [len(head) + size], literals, copies)
        with ReadEngine(opened.store, index, verify="blocks") as engine:
            body = PlannedBody(engine, layout)
    else:
        body = ArrayBody(
            opened.store,
            index,
            row,
            slices,
            head=head,
            itemsize=target.itemsize,
            convert=(lambda array: array) if target == dtype else (lambda array: decode(array, dtype)),
        )
    return body, dtype.name, shape


def _npy_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype of a .npy file: the stored dtype, or a wider dtype that numpy has."""
    if dtype.name == "float4_e2m1fn_x2":
        raise UnprocessableError(f"numpy has no dtype {dtype.name}; use format=safetensors", field="format")
    sample = decode(np.zeros(1, stored_dtype(dtype)), dtype).dtype
    if sample == stored_dtype(dtype):
        return dtype
    return _FLOAT32 if sample == np.float32 else dtypes.BY_NAME["complex64"]


def _npy_head(dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer,
        {"descr": np.lib.format.dtype_to_descr(stored_dtype(dtype)), "fortran_order": False, "shape": shape},
    )
    return buffer.getvalue()


def _safetensors_head(fqn: str, dtype: Dtype, shape: tuple[int, ...]) -> bytes:
    tensor = HeaderTensor(fqn, dtype.code, shape, math.prod(shape) * dtype.itemsize)
    header_order([tensor])
    return safetensors_header([tensor], {"format": "pt"})


# -- grids and statistics ------------------------------------------------------------------------------------


def tensor_grid(
    opened: OpenCheckpoint, fqn: str, slices: Slices | None = None, *, rows: int = 128, columns: int = 128
) -> TensorGrid:
    """Return a slice of at most two dimensions as up to ``rows`` times ``columns`` cells.

    A vector is one row. Memory is bounded by about 128 MiB; above `_READ` elements, a part of each cell is
    read. Raises NotFoundError, UnprocessableError, PlanError, and errors of reading.
    """
    row = opened.row(fqn)
    dtype = opened.index.dtype(row)
    if is_opaque(dtype) or "complex" in dtype.name:
        raise UnprocessableError(f"values of the dtype {dtype.name} have no order", field="fqn")
    with TensorReader(opened.store, opened.index) as reader:
        shape = reader.shape_of(row, slices)
        if len(shape) > 2:
            taken = ", ".join([":", ":", *["0"] * (len(shape) - 2)])
            raise UnprocessableError(
                f"{len(shape)} dimensions remain; pass a slice with two dimensions, for example {taken}",
                field="slice",
            )
        height, width = shape if len(shape) == 2 else (1, math.prod(shape))
        grid = _Grid(height, width, min(rows, height), min(columns, width))
        for across, along in grid.blocks():
            part = [across, along][2 - len(shape) :]
            array = decode(reader.read(row, slices, part), dtype)
            size = (across.stop - across.start, along.stop - along.start)
            grid.add(across.start, along.start, array.reshape(size))
    return TensorGrid(
        clean_text(fqn),
        dtype.name,
        (height, width),
        len(grid.row_starts),
        len(grid.column_starts),
        grid.read < height * width,
        grid.read,
        **grid.columns(),
    )


def tensor_statistics(opened: OpenCheckpoint, fqn: str) -> MeasuredTensor:
    """Read a tensor of up to 64 MiB and return its statistics. Raises NotFoundError, UnprocessableError for a
    larger tensor, and errors of reading."""
    row = opened.row(fqn)
    dtype, shape = opened.index.dtype(row), opened.index.shape(row)
    if math.prod(shape) * dtype.itemsize > _MAX_BYTES:
        raise UnprocessableError(
            f"{fqn[:200]!r} is too large to read in a request: submit a job of the kind stats",
            field="fqn",
        )
    with TensorReader(opened.store, opened.index, verify="full") as reader:
        found = statistics_of_row(reader, row, bins=_BINS)
    return MeasuredTensor(
        clean_text(fqn), dtype.name, shape, statistics_json(found, histogram=True), is_kept=False
    )


class _Grid:
    """Sums over the elements of each cell; ``read`` counts all read elements."""

    def __init__(self, height: int, width: int, rows: int, columns: int) -> None:
        self.height, self.width, self.read = height, width, 0
        self.row_starts = np.arange(rows, dtype=np.int64) * height // max(1, rows)
        self.column_starts = np.arange(columns, dtype=np.int64) * width // max(1, columns)
        self.sums = np.zeros((rows, columns))
        self.counts = np.zeros((rows, columns), np.int64)
        self.min = np.full((rows, columns), math.inf)
        self.max = np.full((rows, columns), -math.inf)
        self.nonfinite = np.zeros((rows, columns), np.int64)

    def blocks(self) -> list[tuple[slice, slice]]:
        """Return the blocks to read: all, or the first rows and columns of each cell."""
        factor = -(-self.height * self.width // _READ)
        across = _taken(self.row_starts, self.height, factor)
        read_rows = sum(one.stop - one.start for one in across)
        along = _taken(self.column_starts, self.width, -(-read_rows * self.width // _READ))
        return [
            (slice(top, min(top + height, one.stop)), slice(left, min(left + width, other.stop)))
            for one in across
            for other in along
            for width in [min(other.stop - other.start, _BLOCK)]
            for height in [max(1, _BLOCK // max(1, width))]
            for top in range(one.start, one.stop, height)
            for left in range(other.start, other.stop, width)
        ]

    def add(self, top: int, left: int, array: npt.NDArray[Any]) -> None:
        """Add the elements of a block with its first element at (top, left)."""
        if not array.size:
            return
        self.read += array.size
        values = array.astype(np.float64)
        is_finite = np.isfinite(values)
        rows, at_rows = _cells(self.row_starts, top, array.shape[0])
        columns, at_columns = _cells(self.column_starts, left, array.shape[1])
        cells = np.ix_(rows, columns)
        for found, by, what in (
            (self.sums, np.add, np.where(is_finite, values, 0.0)),
            (self.counts, np.add, is_finite.astype(np.int64)),
            (self.nonfinite, np.add, (~is_finite).astype(np.int64)),
            (self.min, np.minimum, np.where(is_finite, values, math.inf)),
            (self.max, np.maximum, np.where(is_finite, values, -math.inf)),
        ):
            across = by.reduceat(what, at_columns, axis=1)
            found[cells] = by(found[cells], by.reduceat(across, at_rows, axis=0))

    def columns(self) -> dict[str, tuple[Any, ...]]:
        """Return the columns of `TensorGrid`."""
        has = self.counts > 0
        mean = np.where(has, self.sums / np.maximum(1, self.counts), np.nan)
        largest = np.maximum(np.abs(self.min), np.abs(self.max))
        found = {"mean": mean, "min": self.min, "max": self.max, "abs_max": largest}
        return {
            **{name: _numbers(values, has) for name, values in found.items()},
            "nonfinite": tuple(self.nonfinite.reshape(-1).tolist()),
        }


def _taken(starts: npt.NDArray[np.int64], size: int, factor: int) -> list[slice]:
    """Return the whole ``size``, or of each part the first of ``factor`` equal parts."""
    if factor <= 1:
        return [slice(0, size)] if size else []
    ends = [*starts[1:].tolist(), size]
    return [
        slice(begin, begin + max(1, (end - begin) // factor))
        for begin, end in zip(starts.tolist(), ends, strict=True)
    ]


def _cells(
    starts: npt.NDArray[np.int64], begin: int, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the cells of the elements from ``begin`` on, and the place of the first element of each."""
    first = int(np.searchsorted(starts, begin, "right")) - 1
    last = int(np.searchsorted(starts, begin + size - 1, "right"))
    cells = np.arange(first, last)
    return cells, np.maximum(starts[cells] - begin, 0)


def _numbers(values: Floats, has: npt.NDArray[np.bool_]) -> tuple[float | None, ...]:
    pairs = zip(values.reshape(-1).tolist(), has.reshape(-1).tolist(), strict=True)
    return tuple(float(f"{value:.{_DIGITS}g}") if is_known else None for value, is_known in pairs)
