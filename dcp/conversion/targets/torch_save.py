"""Layout of one torch.save file: `torch.load(weights_only=True)` reads it, mapped too.

Tied tensors share one storage. The nested state dict is made again from the paths that the source keeps of
its flattening, and, where the source tells more (``provenance["structure"]``), with the exact types of
containers and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dcp.conversion.entries import Entries, Value
from dcp.conversion.layout import CopyBuilder, Hole, Literal, TargetLayout
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Path
from dcp.storage.formats.torch_pickle_writer import TensorRef, encode_torch_pickle
from dcp.storage.formats.torch_zip_writer import ALIGNMENT_BYTES, ZipLayout

__all__ = ["torch_layout"]

_FOLDER: Final = "archive"
"""What torch.save calls it where it writes to a stream; readers take any."""


def torch_layout(
    name: str,
    entries: Entries,
    values: Sequence[tuple[Value, Any]],
    build: Callable[[Mapping[str, Path], Mapping[str, Any]], Any],
) -> TargetLayout:
    """The file ``name`` with the tensors of ``entries`` and ``values``.

    ``build`` makes the nested state dict of paths and values by name.
    """
    keys: dict[int, str] = {}
    refs = []
    for entry in entries.tensors:
        key = keys.setdefault(entry.tied_to, str(len(keys)))
        sizes = entries.shape(entry)
        refs.append(
            TensorRef(
                entry.dtype_code,
                key,
                math.prod(sizes),
                sizes,
                requires_grad=bool(entries.index.requires_grad[entry.tensor]),
            )
        )
    contents: dict[str, Any] = {entry.fqn: ref for entry, ref in zip(entries.tensors, refs, strict=True)}
    contents |= {value.fqn: content for value, content in values}
    paths = {fqn: path for fqn, path in entries.paths.items() if fqn in contents}
    archive = ZipLayout(_FOLDER)
    archive.add("data.pkl", encode_torch_pickle(build(paths, contents)))
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    archive.add("byteorder", b"little")
    copies, tensor_copies = CopyBuilder(), {}
    for number, entry in enumerate(entries.tensors):
        if entry.tied_to == number:
            sizes = entries.shape(entry)
            size = math.prod(sizes) * dtypes.BY_CODE[entry.dtype_code].itemsize
            copy = len(copies.tensors)
            offset = archive.reserve(f"data/{keys[number]}", size, copy)
            copies.add(entry.tensor, ((0,) * len(sizes), sizes), entry.dtype_code, 0, offset)
            tensor_copies[entry.fqn] = copy
        else:
            tensor_copies[entry.fqn] = tensor_copies[entries.tensors[entry.tied_to].fqn]
    archive.add("version", b"3\n")
    archive.finish()
    return TargetLayout(
        file_names=[name],
        file_sizes=[archive.size_bytes],
        literals=[Literal(0, part.offset, part.data) for part in archive.parts],
        copies=copies.build(),
        holes=[Hole(key, 0, part.offset + at) for part in archive.parts for key, at in part.crc_holes],
        tensor_copies=tensor_copies,
    )
