"""Layout of one torch.save file, for `torch.load(weights_only=True)` with or without mmap.

Tied tensors share a storage. Tensors inside values, such as an optimizer's ``betas``, have separate storages.
The nested state dict is rebuilt from the source's paths, with exact container and key types if recorded
(``provenance["structure"]``).
"""

from __future__ import annotations

import logging
from itertools import repeat
from typing import Any, Final

import numpy as np

from dcp.conversion.layout import Copies, Hole, Literals, TargetLayout, payload_crcs
from dcp.conversion.targets.job import LayoutJob, Planned, torch_allows
from dcp.storage.errors import PlanError
from dcp.storage.formats.native.record import ALIGNMENT_BYTES
from dcp.storage.formats.torch.archive import MAX_FILE_ENTRIES
from dcp.storage.formats.torch.pickle_reader import MAX_FILE_PICKLE_BYTES, SizePickle
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.formats.torch.writer import (
    PickledTensor,
    Storages,
    TensorRef,
    ZipLayout,
    encode_torch_pickle,
)
from dcp.storage.near_names import listed

logger = logging.getLogger(__name__)

_MAX_LISTED: Final = 10
_SIZE: Final = "torch.Size"
_FOLDER: Final = "archive"
"""Folder name that torch.save uses for streams; readers accept any name."""

_OTHER_ENTRIES: Final = 5
"""Number of zip entries besides the storages."""


def lay_out(job: LayoutJob) -> Planned:
    """Lay out the target; values are pickled again, with trusted classes only. PlanError for values that
    readers refuse."""
    entries, index = job.entries, job.entries.index
    contents, dropped = job.contents(is_plain_only=False)
    notes = entries.structure() or {}
    _warn_of_distrusted(contents, notes)
    kinds = notes.get("values") or {}
    for fqn, value in contents.items():
        if kinds.get(fqn) == _SIZE and type(value) is tuple:
            contents[fqn] = SizePickle(value)
    flags = index.requires_grad.tolist()
    facts = zip(entries.tensors, entries.elements.tolist(), entries.shapes, strict=True)
    for (row, fqn, code, storage), elements, shape in facts:
        contents[fqn] = TensorRef(code, str(storage), elements, shape, bool(flags[row]))
    paths = {fqn: path for fqn, path in entries.paths.items() if fqn in contents}
    nested = restore_structure(notes or None, paths, contents.__getitem__)
    storages: Storages = {}
    pickled = encode_torch_pickle(nested, storages)
    if len(storages) + _OTHER_ENTRIES > MAX_FILE_ENTRIES or len(pickled) > MAX_FILE_PICKLE_BYTES:
        raise PlanError(
            f"the torch.save file would have {len(storages)} tensors and a pickle of {len(pickled)} bytes; "
            f"limits are {MAX_FILE_ENTRIES} and {MAX_FILE_PICKLE_BYTES}. Convert in parts (only=), or to "
            "another format"
        )
    archive = ZipLayout(_FOLDER)
    archive.add("data.pkl", pickled)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT_BYTES).encode())
    archive.add("byteorder", b"little")
    copies, copy_of = _add_storages(archive, job, storages)
    archive.add("version", b"3\n")
    archive.finish()
    offsets = np.array(archive.offsets, np.int64)
    layout = TargetLayout(
        file_names=[job.file_name or ""],
        file_sizes=[archive.size_bytes],
        literals=Literals(np.zeros_like(offsets), offsets, archive.parts),
        copies=copies,
        holes=[Hole(key, 0, at) for key, at in archive.crc_holes],
        tensor_copies={entry.fqn: copy_of[entry.tied_to] for entry in entries.tensors},
    )
    return Planned(layout, dropped)


def _warn_of_distrusted(contents: dict[str, Any], notes: dict[str, Any]) -> None:
    """Warn of values that `torch.load(weights_only=True)` refuses."""
    found = [fqn for fqn, value in contents.items() if not torch_allows(value)]
    containers = notes.get("containers", ())
    found += [
        ".".join(map(str, note["path"]))
        for note in containers
        if note.get("kind") in ("deque", "defaultdict")
    ]
    if found:
        logger.warning(
            "torch.load will need weights_only=False for the file, because of %s; dcp.load does not",
            listed(found, most=_MAX_LISTED),
        )


def _add_storages(archive: ZipLayout, job: LayoutJob, storages: Storages) -> tuple[Copies, dict[int, int]]:
    """Add storages to ``archive``; return their copies in order and their numbers by entry.

    Unchanged copies with a known checksum need no hole.
    """
    entries, index = job.entries, job.entries.index
    literal: dict[int, bytes] = {}
    numbers: list[int] = []
    places: list[int] = []
    for at, one in enumerate(storages):
        if isinstance(one, PickledTensor):
            literal[at] = one.data
        else:
            numbers.append(int(one))
            places.append(at)
    rows, codes = entries.rows[numbers], entries.codes[numbers]
    sizes, known = np.zeros((2, len(storages)), np.int64)
    holes = np.full(len(storages), -1, np.int64)
    sizes[list(literal)] = list(map(len, literal.values()))
    sizes[places] = entries.size_bytes[numbers]
    stored = payload_crcs(index) if job.is_compared else {}
    crcs = np.array(list(map(stored.get, rows.tolist(), repeat(-1))), np.int64)
    crcs[index.dtype_codes[rows] != codes] = -1
    holes[places] = np.where(crcs < 0, np.arange(len(numbers)), -1)
    known[places] = np.maximum(crcs, 0)
    offsets = archive.reserve("data", sizes, holes, known, literal)[places]
    files = np.zeros(len(numbers), np.int64)
    copies = Copies.of_tensors(index, rows, codes, files, offsets, sizes[places])
    return copies, dict(zip(numbers, range(len(numbers)), strict=True))
