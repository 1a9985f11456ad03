"""Layout of one torch.save file: `torch.load(weights_only=True)` reads it, mapped too.

Tied tensors share one storage. Tensors within values, as of an optimizer's ``betas``, have
storages of their own. The nested state dict is made again from the paths that the source keeps of
its flattening, and, where the source tells more (``provenance["structure"]``), with the exact types of
containers and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from dcp.conversion.entries import Entries, Entry, Value
from dcp.conversion.layout import Copies, Hole, Literal, TargetLayout
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Path
from dcp.storage.formats.torch.archive import MAX_FILE_ENTRIES
from dcp.storage.formats.torch.pickle_reader import MAX_FILE_PICKLE_BYTES
from dcp.storage.formats.torch.pickle_writer import StoredTensor, TensorRef, encode_torch_pickle
from dcp.storage.formats.torch.zip_writer import ALIGNMENT_BYTES, ZipLayout

__all__ = ["torch_layout"]

_FOLDER: Final = "archive"
"""What torch.save calls it where it writes to a stream; readers take any."""

_OTHER_ENTRIES: Final = 5
"""Of the zip, beside the storages."""


def torch_layout(
    name: str,
    entries: Entries,
    values: Sequence[tuple[Value, Any]],
    build: Callable[[Mapping[str, Path], Mapping[str, Any]], Any],
    crcs: Mapping[int, int],
) -> TargetLayout:
    """The file ``name`` with the tensors of ``entries`` and ``values``.

    ``build`` makes the nested state dict of paths and values by name. ``crcs`` are those of tensors of the
    source, by row, where they are known: what is copied as it is needs no hole. PlanError for more than
    readers accept.
    """
    grads = entries.index.requires_grad.tolist()
    contents: dict[str, Any] = {
        entry.fqn: _ref(entry, entries.shape(entry), bool(grads[entry.tensor])) for entry in entries.tensors
    }
    contents |= {value.fqn: content for value, content in values}
    paths = {fqn: path for fqn, path in entries.paths.items() if fqn in contents}
    # Storages are numbered as torch.load comes across them: it may compute their places from that.
    keys: dict[str | StoredTensor, str] = {}
    nested = build(paths, contents)
    for ref in _refs(nested):
        keys.setdefault(ref if isinstance(ref, StoredTensor) else ref.key, str(len(keys)))
    pickled = encode_torch_pickle(nested, keys)
    _check_readable(len(keys), len(pickled))
    archive = ZipLayout(_FOLDER)
    archive.add("data.pkl", pickled)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    archive.add("byteorder", b"little")
    chosen: list[Entry] = []
    offsets: list[int] = []
    sizes: list[int] = []
    copy_of: dict[int, int] = {}
    source_codes = entries.index.dtype_codes.tolist() if crcs else []
    for storage, key in keys.items():
        if isinstance(storage, StoredTensor):
            archive.add(f"data/{key}", storage.data)
            continue
        entry = entries.tensors[int(storage)]
        size = math.prod(entries.shape(entry)) * dtypes.BY_CODE[entry.dtype_code].itemsize
        copy = copy_of[int(storage)] = len(chosen)
        is_kept = bool(crcs) and source_codes[entry.tensor] == entry.dtype_code
        crc = crcs.get(entry.tensor) if is_kept else None
        offsets.append(archive.reserve(f"data/{key}", size, copy, crc))
        sizes.append(size)
        chosen.append(entry)
    copies = Copies.of_tensors(
        entries.index,
        [entry.tensor for entry in chosen],
        [entry.dtype_code for entry in chosen],
        [0] * len(chosen),
        offsets,
        sizes,
    )
    tensor_copies = {entry.fqn: copy_of[entry.tied_to] for entry in entries.tensors}
    archive.add("version", b"3\n")
    archive.finish()
    return TargetLayout(
        file_names=[name],
        file_sizes=[archive.size_bytes],
        literals=[Literal(0, part.offset, part.data) for part in archive.parts],
        copies=copies,
        holes=[Hole(key, 0, part.offset + at) for part in archive.parts for key, at in part.crc_holes],
        tensor_copies=tensor_copies,
    )


def _check_readable(storages: int, pickle_bytes: int) -> None:
    if storages + _OTHER_ENTRIES > MAX_FILE_ENTRIES or pickle_bytes > MAX_FILE_PICKLE_BYTES:
        raise PlanError(
            f"one torch.save file would have {storages} tensors and a pickle of {pickle_bytes} bytes, and "
            f"readers accept {MAX_FILE_ENTRIES} and {MAX_FILE_PICKLE_BYTES}: convert it in parts (`only`), "
            "or to another format"
        )


def _ref(entry: Entry, sizes: tuple[int, ...], requires_grad: bool) -> TensorRef:
    key = str(entry.tied_to)
    return TensorRef(entry.dtype_code, key, math.prod(sizes), sizes, requires_grad=requires_grad)


def _refs(value: Any) -> Iterator[TensorRef | StoredTensor]:
    """The tensors of a nested state dict in the order in which they are pickled."""
    if isinstance(value, TensorRef | StoredTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _refs(item)
