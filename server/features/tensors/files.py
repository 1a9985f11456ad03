"""Files of one tensor, or of a slice of it: .npy and .safetensors. Imports what reads tensors."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from dcp.conversion.layout import Copies, Literals, TargetLayout
from dcp.conversion.layout import Literal as LiteralBytes
from dcp.inspection.values.elements import decode, stored_dtype
from dcp.inspection.values.tensor_reading import Slices, select
from dcp.server.core.data.bodies import Body
from dcp.server.core.data.opening import OpenCheckpoint
from dcp.server.core.data.planned import ArrayBody, PlannedBody
from dcp.server.core.problems import UnprocessableError
from dcp.storage.engine.read import ReadEngine
from dcp.storage.formats import dtypes
from dcp.storage.formats.dtypes import CASTABLE, Dtype
from dcp.storage.formats.safetensors import HeaderTensor, header_order, safetensors_header

__all__ = ["PlannedTensor", "plan_tensor"]

_FLOAT32: Final = dtypes.BY_NAME["float32"]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """``dtype`` is of the elements in the body: float32 where .npy has no type for those that are stored."""

    body: Body
    fqn: str
    dtype: str
    stored_dtype: str
    shape: tuple[int, ...]


def plan_tensor(opened: OpenCheckpoint, fqn: str, slices: Slices | None, to: str) -> PlannedTensor:
    """The file of the tensor ``fqn``.

    Raises NotFoundError if there is none, UnprocessableError for types that the format does not have, and
    PlanError for slices that do not fit.
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
    return PlannedTensor(body, fqn, target.name, dtype.name, shape)


def _npy_dtype(dtype: Dtype) -> Dtype:
    """The element type of a .npy file: the same if numpy has it, else one that can hold all values."""
    if dtype.name == "float4_e2m1fn_x2":
        raise UnprocessableError(f"numpy has no {dtype.name}; ask for safetensors", field="format")
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
