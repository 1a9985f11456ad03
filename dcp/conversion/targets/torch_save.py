"""Layout of one torch.save file: `torch.load(weights_only=True)` reads it, mapped too.

Tied tensors share one storage. Tensors within values, as of an optimizer's ``betas``, have
storages of their own. The nested state dict is made again from the paths that the source keeps of
its flattening, and, where the source tells more (``provenance["structure"]``), with the exact types of
containers and keys.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, Final

import numpy as np

from dcp.conversion.contents.entries import Entries, Value
from dcp.conversion.contents.values import torch_allows
from dcp.conversion.layouts.layout import Copies, Hole, Literals, TargetLayout
from dcp.conversion.targets.job import LayoutJob, Planned
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Path
from dcp.storage.formats.torch.archive import MAX_FILE_ENTRIES
from dcp.storage.formats.torch.pickle_reader import MAX_FILE_PICKLE_BYTES
from dcp.storage.formats.torch.pickle_writer import PickledTensor, SizeValue, TensorRef, encode_torch_pickle
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.formats.torch.zip_writer import ALIGNMENT_BYTES, ZipLayout
from dcp.storage.near_names import listed

__all__ = ["lay_out", "torch_layout"]

logger = logging.getLogger(__name__)

_MAX_LISTED: Final = 10
_SIZE: Final = "torch.Size"
_FOLDER: Final = "archive"
"""What torch.save calls it where it writes to a stream; readers take any."""

_OTHER_ENTRIES: Final = 5
"""Of the zip, beside the storages."""


def lay_out(job: LayoutJob) -> Planned:
    """The target of a conversion; values are pickled anew, of classes that need no trust."""
    contents, refused = job.contents(is_plain_only=False)
    kept, dropped = job.kept(refused)
    pairs = [(value, contents[value.fqn]) for value in kept]
    distrusted = [value.fqn for value, content in pairs if not torch_allows(content)]
    distrusted += [
        ".".join(map(str, note["path"]))
        for note in (job.entries.structure() or {}).get("containers", ())
        if note.get("kind") in ("deque", "defaultdict")
    ]
    if distrusted:
        logger.warning(
            "torch.load will need weights_only=False for the file, because of %s; dcp.load does not",
            listed(distrusted, most=_MAX_LISTED),
        )
    build = _structure_of(job.entries)
    return Planned(torch_layout(job.file_name or "", job.entries, pairs, build, job.crcs), dropped)


def _structure_of(entries: Entries) -> Any:
    """A function of (fqn -> path, fqn -> value) that builds the nested state dict as the source had it."""
    notes = entries.structure()
    kinds = notes.get("values", {}) if notes else {}

    def build(paths: Mapping[str, Path], values: Mapping[str, Any]) -> Any:
        def value_of(fqn: str) -> Any:
            value = values[fqn]
            return SizeValue(value) if kinds and kinds.get(fqn) == _SIZE and type(value) is tuple else value

        return restore_structure(notes, paths, value_of)

    return build


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
    contents = _refs(entries) | {value.fqn: content for value, content in values}
    paths = entries.paths
    if len(contents) < len(paths):
        paths = {fqn: path for fqn, path in paths.items() if fqn in contents}
    nested = build(paths, contents)
    # Storages are numbered as torch.load comes across them: it may compute their places from that.
    storages = list(dict.fromkeys(map(_storage, _tensors_in(nested))))
    keys = {storage: str(number) for number, storage in enumerate(storages)}
    pickled = encode_torch_pickle(nested, keys)
    _check_readable(len(keys), len(pickled))
    archive = ZipLayout(_FOLDER)
    archive.add("data.pkl", pickled)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    archive.add("byteorder", b"little")
    copies, tensor_copies = _add_storages(archive, entries, storages, crcs)
    archive.add("version", b"3\n")
    archive.finish()
    offsets = np.array(archive.offsets, np.int64)
    return TargetLayout(
        file_names=[name],
        file_sizes=[archive.size_bytes],
        literals=Literals(np.zeros_like(offsets), offsets, archive.parts),
        copies=copies,
        holes=[Hole(key, 0, at) for key, at in archive.crc_holes],
        tensor_copies=tensor_copies,
    )


def _add_storages(
    archive: ZipLayout, entries: Entries, storages: Sequence[str | PickledTensor], crcs: Mapping[int, int]
) -> tuple[Copies, dict[str, int]]:
    """What is copied into ``archive``, and the copy of each tensor by its name."""
    contents = {n: storage.data for n, storage in enumerate(storages) if isinstance(storage, PickledTensor)}
    numbers = [int(storage) for storage in storages if not isinstance(storage, PickledTensor)]
    places = np.delete(np.arange(len(storages)), list(contents))
    facts = [(entry.tensor, entry.dtype_code) for entry in entries.tensors]
    rows, codes = np.array(facts, np.int64).reshape(-1, 2)[numbers].T
    itemsizes = np.zeros(max(dtypes.BY_CODE) + 1, np.int64)
    itemsizes[list(dtypes.BY_CODE)] = [dtype.itemsize for dtype in dtypes.BY_CODE.values()]
    sizes, holes, known = (np.full(len(storages), fill, np.int64) for fill in (0, -1, 0))
    sizes[list(contents)] = [len(data) for data in contents.values()]
    sizes[places] = np.array(entries.elements, np.int64)[numbers] * itemsizes[codes]
    found = np.array([crcs.get(row, -1) for row in rows.tolist()], np.int64)
    found[entries.index.dtype_codes[rows] != codes] = -1  # not copied as it is
    holes[places] = np.where(found < 0, np.arange(len(numbers)), -1)
    known[places] = np.maximum(found, 0)
    offsets = archive.reserve("data", sizes, holes, known, contents)[places]
    files = np.zeros(len(numbers), np.int64)
    copies = Copies.of_tensors(entries.index, rows, codes, files, offsets, sizes[places])
    copy_of = {number: copy for copy, number in enumerate(numbers)}
    return copies, {entry.fqn: copy_of[entry.tied_to] for entry in entries.tensors}


def _check_readable(storages: int, pickle_bytes: int) -> None:
    if storages + _OTHER_ENTRIES > MAX_FILE_ENTRIES or pickle_bytes > MAX_FILE_PICKLE_BYTES:
        raise PlanError(
            f"one torch.save file would have {storages} tensors and a pickle of {pickle_bytes} bytes, and "
            f"readers accept {MAX_FILE_ENTRIES} and {MAX_FILE_PICKLE_BYTES}: convert it in parts (`only`), "
            "or to another format"
        )


def _refs(entries: Entries) -> dict[str, Any]:
    """The tensors by name."""
    flags = entries.index.requires_grad.astype(bool).tolist()
    rows, names, _, codes, storages = zip(*entries.tensors, strict=True) if entries.tensors else ((),) * 5
    grads = [flags[row] for row in rows]
    facts = zip(codes, map(str, storages), entries.elements, entries.shapes, grads, strict=True)
    return dict(zip(names, starmap(TensorRef, facts), strict=True))


def _storage(tensor: TensorRef | PickledTensor) -> str | PickledTensor:
    return tensor if isinstance(tensor, PickledTensor) else tensor.key


def _tensors_in(nested: Any) -> list[TensorRef | PickledTensor]:
    """The tensors of a nested state dict in the order in which they are pickled."""
    found: list[TensorRef | PickledTensor] = []
    _find(nested, found)
    return found


def _find(value: Any, found: list[TensorRef | PickledTensor]) -> None:
    if isinstance(value, TensorRef | PickledTensor):
        found.append(value)
    elif isinstance(value, dict | list | tuple | deque):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) is TensorRef:  # the most there is
                found.append(item)
            else:
                _find(item, found)
