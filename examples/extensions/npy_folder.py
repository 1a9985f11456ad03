"""A format: a folder with one ``.npy`` file per tensor, named like the tensor."""

from __future__ import annotations

import io
import math
import re

import numpy as np

from dcp.conversion.layout import Copies, Literal, Literals, TargetLayout
from dcp.conversion.targets.job import LayoutJob, Planned
from dcp.storage.errors import CheckpointFormatError, PlanError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.format import Format, Target
from dcp.storage.formats.index import CheckpointIndex, WholeTensor
from dcp.storage.stores import Store, check_name

_FILE = re.compile(r"[^.].*\.npy", re.DOTALL)
_HEADER_BYTES = 64 << 10


def read_folder(store: Store) -> CheckpointIndex | None:
    """Read the header of each file into an index; read no elements. None if the folder has no such file."""
    sizes = {info.name: info.size_bytes for info in store.list() if _FILE.fullmatch(info.name)}
    if not sizes:
        return None
    return CheckpointIndex.of_whole_tensors(FORMAT.name, [_tensor(store, name) for name in sizes], sizes)


def _tensor(store: Store, name: str) -> WholeTensor:
    path, header = store.path_of(name), io.BytesIO(store.read_start(name, _HEADER_BYTES)[0])
    try:
        np.lib.format.read_magic(header)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(header)
    except ValueError as error:
        raise CheckpointFormatError(f"{path}: {error}", path=path) from error
    if is_fortran or dtype.name not in dtypes.BY_NAME or dtype.byteorder == ">":
        raise UnsupportedFormatError(f"{path}: {dtype}, Fortran order: {is_fortran}; use C order", path=path)
    code = dtypes.BY_NAME[dtype.name].code
    return WholeTensor(name.removesuffix(".npy"), code, shape, name, offset=header.tell())


def lay_out(job: LayoutJob) -> Planned:
    """Lay out one file per tensor: a header and the unchanged elements. Values are dropped."""
    _, dropped = job.kept({value.fqn: "not a tensor" for value in job.entries.values})
    tensors, shapes = job.entries.tensors, job.entries.shapes
    kinds = [dtypes.BY_CODE[tensor.dtype_code] for tensor in tensors]
    heads = [_header(kind.name, shape) for kind, shape in zip(kinds, shapes, strict=True)]
    sizes = [math.prod(shape) * kind.itemsize for kind, shape in zip(kinds, shapes, strict=True)]
    layout = TargetLayout(
        file_names=[check_name(f"{tensor.fqn}.npy") for tensor in tensors],
        file_sizes=[len(head) + size for head, size in zip(heads, sizes, strict=True)],
        literals=Literals.of([Literal(number, 0, head) for number, head in enumerate(heads)]),
        copies=Copies.of_tensors(
            job.entries.index,
            tensors=[tensor.tensor for tensor in tensors],
            dtype_codes=[tensor.dtype_code for tensor in tensors],
            files=range(len(tensors)),
            offsets=[len(head) for head in heads],
            size_bytes=sizes,
        ),
        tensor_copies={tensor.fqn: number for number, tensor in enumerate(tensors)},
    )
    return Planned(layout, dropped)


def _header(kind: str, shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    try:
        descr = np.dtype(kind).str
    except TypeError as error:
        raise PlanError(f"numpy has no {kind}; convert with dtype='float32'") from error
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


TARGET = Target(name="npy", layout=lay_out)
FORMAT = Format(name="npy", folder_files=_FILE, read_folder=read_folder, is_loose=True, target=TARGET)
