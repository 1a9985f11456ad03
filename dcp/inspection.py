"""What checkpoints there are and what is in them, from their indexes alone.

No tensor is read, and torch is not needed.

Functions return data classes; the command line and the service render them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
)
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.manifest import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.object_blob import ObjectBlob
from dcp.storage.formats.open import is_commit_object
from dcp.storage.formats.open import open_index as _open_index
from dcp.storage.formats.plain import MAX_PLAIN_BYTES
from dcp.storage.formats.python_values import decode_value, python_value
from dcp.storage.formats.sources import FILE_FORMATS, open_source
from dcp.storage.stores.base import FileInfo, Store
from dcp.storage.stores.folders import open_root
from dcp.storage.stores.opening import OpenWith
from dcp.storage.threads import WorkerThreads

__all__ = [
    "CheckpointHeader",
    "CheckpointSummary",
    "ModuleNode",
    "ObjectRow",
    "TensorRow",
    "header_of",
    "list_checkpoints",
    "module_tree",
    "object_row",
    "object_rows",
    "open_index",
    "tensor_rows",
]

_Place: TypeAlias = tuple[int, int, int]

_BLOBS_AT_ONCE = 1024
_MAX_SHOWN_BYTES = 256 << 20
_STEP = re.compile(r"([0-9]+)$")
_DATA_SUFFIX = ".distcp"


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint of a folder.

    ``state`` is "committed", "incomplete" (data files that no save committed) or "unreadable" (``problem``
    says why). ``step`` is the number at the end of the name. ``bytes`` is the size of the files it refers to.
    What is not known is None.
    """

    name: str
    url: str
    state: str
    step: int | None = None
    committed_seconds: float | None = None
    format: str | None = None
    tensors: int | None = None
    bytes: int | None = None
    world_size: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """A checkpoint as a whole; ``bytes`` are those of the tensors, ``file_bytes`` those of the files.

    ``rank_seconds`` are the durations of the save's phases by rank, none where the writer noted none, and
    ``rank_traffic`` what each rank asked of the storage's service until it had written its files: see
    `dcp.storage.stores.base.Store.traffic`.
    """

    url: str
    format: str
    save_id: str | None
    torch_version: str | None
    dcphub_version: str | None
    world_size: int | None
    committed_seconds: float | None
    tensors: int
    chunks: int
    objects: int
    files: int
    bytes: int
    file_bytes: int
    user: Mapping[str, Any]
    rank_seconds: tuple[Mapping[str, float], ...] = ()
    rank_traffic: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: its global shape, and the number, bytes and files of its chunks."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One non-tensor value. ``value`` counts only where ``is_plain`` (or harmless otherwise); others stay
    pickled, ``bytes`` long."""

    fqn: str
    is_plain: bool
    value: Any
    bytes: int
    file: str | None


@dataclass(slots=True)
class ModuleNode:
    """A module: what is below one dotted prefix. ``tensor`` is set where the name itself is a tensor."""

    name: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    tensor: TensorRow | None = None
    children: dict[str, ModuleNode] = field(default_factory=dict)


def open_index(
    checkpoint_id: str | os.PathLike[str],
    *,
    rank: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointIndex:
    """The index of the checkpoint under ``checkpoint_id``: a path, or a URL of a supported store.

    It may be a folder with a commit, a file of torch.save or safetensors, or a folder of such files (see
    `dcp.storage.formats.sources`).

    ``rank`` picks that rank's part of a save without collectives; by default all parts are merged.
    ``storage_options`` are those of a URL's file system, as for `dcp.load`.
    Raises `CheckpointNotFoundError` where no save was committed, `CheckpointFormatError` on damaged metadata.
    """
    return open_source(checkpoint_id, open_store=OpenWith(storage_options), rank=rank).index


def list_checkpoints(
    checkpoint_id: str | os.PathLike[str],
    *,
    quick: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointSummary]:
    """The checkpoints in a folder, by step and name; one alone if ``checkpoint_id`` is a checkpoint itself.

    Folders without files of a checkpoint are left out. An unreadable checkpoint is listed as such.
    With ``quick`` no file is opened, and everything is by the listings: ``committed_seconds`` is the time of
    the commit object, ``bytes`` the size of all data files, and format, tensors and ranks are not known.
    Raises `CheckpointNotFoundError` if there is no such folder.
    """
    opener = OpenWith(storage_options)
    store = opener(checkpoint_id)
    own = _summarize(store, store.list(), quick=quick)  # no row for a place that cannot be listed itself
    if own is not None:
        return [own]
    root = open_root(checkpoint_id, open_store=opener)
    if not root.exists():
        raise CheckpointNotFoundError(f"{root.url}: no such folder", path=root.url)

    def summary(folder: tuple[str, list[FileInfo] | None]) -> CheckpointSummary | None:
        return _summarize(root.store(folder[0]), folder[1], quick=quick)

    folders = root.listings().items()
    if root.at_once > 1 and not quick:
        with WorkerThreads(root.at_once) as pool:
            found = list(pool.map(summary, folders))
    else:
        found = list(map(summary, folders))
    summaries = [summary for summary in found if summary is not None]
    return sorted(summaries, key=lambda summary: (-1 if summary.step is None else summary.step, summary.name))


def _summarize(
    store: Store, files: Sequence[FileInfo] | None = None, *, quick: bool
) -> CheckpointSummary | None:
    """None if the folder has nothing of a checkpoint; ``files`` is its listing, where that is known."""
    name = store.url.rstrip("/").rsplit("/", 1)[-1]
    match = _STEP.search(name)
    step = int(match[1]) if match else None
    try:
        if files is None:
            files = store.list()
        data_bytes = [file.size_bytes for file in files if file.name.endswith(_DATA_SUFFIX)]
        committed = [file for file in files if is_commit_object(file.name)]
        if not committed:
            left = sum(data_bytes)
            return CheckpointSummary(name, store.url, "incomplete", step, bytes=left) if data_bytes else None
        if quick:
            seconds = max(file.modified_seconds for file in committed)
            return CheckpointSummary(name, store.url, "committed", step, seconds, bytes=sum(data_bytes))
        index = _open_index(store)
    except CheckpointError as error:
        return CheckpointSummary(name, store.url, "unreadable", step, problem=str(error))
    header = header_of(store, index, files)
    return CheckpointSummary(
        name,
        store.url,
        "committed",
        step,
        header.committed_seconds,
        header.format,
        header.tensors,
        header.file_bytes,
        header.world_size,
    )


def header_of(
    store: Store,
    index: CheckpointIndex,
    files: Sequence[FileInfo] | None = None,
    *,
    url: str | None = None,
) -> CheckpointHeader:
    """Facts about the checkpoint of ``store``; ``files`` is its listing, where the caller has it already.

    ``url`` names a checkpoint that is one file of the store.
    """
    listing = {file.name: file for file in (store.list() if files is None else files)}
    provenance = index.provenance
    committed = provenance.get("time")
    if committed is None:
        committed = _committed_seconds(index, listing)
    return CheckpointHeader(
        url=store.url if url is None else url,
        format=index.format,
        save_id=provenance.get("save_id"),
        torch_version=provenance.get("torch_version"),
        dcphub_version=provenance.get("dcphub_version"),
        world_size=provenance.get("world_size"),
        committed_seconds=committed,
        tensors=index.tensor_count,
        chunks=index.chunk_count,
        objects=len(index.objects),
        files=len(index.files),
        bytes=index.tensor_bytes,
        file_bytes=sum(listing[name].size_bytes for name in index.files if name in listing),
        user=index.user,
        rank_seconds=_by_rank(provenance.get("rank_seconds")),
        rank_traffic=_by_rank(provenance.get("rank_traffic")),
    )


def _committed_seconds(index: CheckpointIndex, listing: Mapping[str, FileInfo]) -> float | None:
    """When the commit object was written; of files without one, when the last of them was."""
    names: Sequence[str] = [name for name in (METADATA_NAME, MANIFEST_NAME) if name in listing][:1]
    if index.format in FILE_FORMATS:
        names = index.files
    return max((listing[name].modified_seconds for name in names if name in listing), default=None)


def _by_rank(noted: object) -> tuple[dict[str, float], ...]:
    """What of ``noted`` is figures by rank: a manifest may come from anybody."""
    if not isinstance(noted, list):
        return ()
    ranks = [figures if isinstance(figures, dict) else {} for figures in noted]
    return tuple(
        {str(name): float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for figures in ranks
    )


def tensor_rows(index: CheckpointIndex) -> list[TensorRow]:
    """All tensors in the order of the index."""
    sizes = np.zeros(index.tensor_count, dtype=np.int64)
    np.add.at(sizes, index.chunk_tensors, index.payload_lengths)
    chunks = np.diff(index.chunk_start).tolist()
    shape_start, shape_values = index.shape_start.tolist(), index.shape_values.tolist()
    files = _files_of_tensors(index)
    return [
        TensorRow(
            fqn,
            index.dtype(row).name,
            tuple(shape_values[shape_start[row] : shape_start[row + 1]]),
            chunks[row],
            size,
            files[row],
        )
        for row, (fqn, size) in enumerate(zip(index.fqns, sizes.tolist(), strict=True))
    ]


def _files_of_tensors(index: CheckpointIndex) -> list[tuple[str, ...]]:
    pairs = np.unique(np.stack([index.chunk_tensors, index.chunk_files]), axis=1)
    ends = np.searchsorted(pairs[0], np.arange(index.tensor_count + 1)).tolist()
    names = [index.files[file] for file in pairs[1].tolist()]
    return [tuple(names[ends[row] : ends[row + 1]]) for row in range(index.tensor_count)]


def object_rows(store: Store, index: CheckpointIndex) -> list[ObjectRow]:
    """All non-tensor values in the order of the index.

    Plain ones are decoded, and of those that are pickled the harmless ones of up to 64 KiB.
    """
    objects = index.objects
    values = [decode_value(data) for data in objects.values]
    columns = [c.tolist() for c in (objects.files, objects.offsets, objects.lengths, objects.plain)]
    pickled = {
        (file, at, length) for file, at, length, plain in zip(*columns, strict=True) if plain == UNKNOWN
    }
    decoded = _plain_values(store, index, [place for place in sorted(pickled) if place[2] <= MAX_PLAIN_BYTES])
    rows = []
    for fqn, file, offset, length, plain in zip(objects.fqns, *columns, strict=True):
        name = index.files[file] if file != UNKNOWN else None
        if plain != UNKNOWN:
            size_bytes = len(objects.values[plain]) if name is None else length
            rows.append(ObjectRow(fqn, True, values[plain], size_bytes, name))
            continue
        place = file, offset, length
        rows.append(ObjectRow(fqn, place in decoded, decoded.get(place), length, name))
    return rows


def object_row(store: Store, index: CheckpointIndex, fqn: str) -> ObjectRow:
    """One non-tensor value, decoded if it is harmless."""
    objects = index.objects
    at = objects.position[fqn]
    place = int(objects.files[at]), int(objects.offsets[at]), int(objects.lengths[at])
    plain = int(objects.plain[at])
    name = index.files[place[0]] if place[0] != UNKNOWN else None
    if plain != UNKNOWN:
        data = objects.values[plain]
        return ObjectRow(fqn, True, decode_value(data), len(data) if name is None else place[2], name)
    found = _plain_values(store, index, [place]) if place[2] <= _MAX_SHOWN_BYTES else {}
    return ObjectRow(fqn, place in found, found.get(place), place[2], name)


def _plain_values(store: Store, index: CheckpointIndex, places: list[_Place]) -> dict[_Place, Any]:
    """What at ``places`` (file, offset, length) is harmless, decoded without running anything."""
    found: dict[_Place, Any] = {}
    with ReadEngine(store, index, threads=store.read_profile.threads or 1) as engine:
        for first in range(0, len(places), _BLOBS_AT_ONCE):
            some = places[first : first + _BLOBS_AT_ONCE]
            for place, blob in zip(some, engine.read_blobs(some), strict=True):
                with contextlib.suppress(CheckpointFormatError):
                    found[place] = _plain_value(blob)
    return found


def _plain_value(blob: bytes) -> Any:
    """The value of a torch.save blob; `CheckpointFormatError` if it is not harmless, or the blob is none."""
    opened = ObjectBlob(blob)
    return python_value(opened.decoded, opened.pickle_bytes)


def module_tree(rows: Iterable[TensorRow]) -> ModuleNode:
    """Tensors grouped by the dots in their names, with sums; the root has an empty name."""
    root = ModuleNode("")
    for row in rows:
        elements = 1
        for size in row.shape:
            elements *= size
        node = root
        _count(node, elements, row.bytes)
        for part in row.fqn.split("."):
            node = node.children.setdefault(part, ModuleNode(part))
            _count(node, elements, row.bytes)
        node.tensor = row
    return root


def _count(node: ModuleNode, elements: int, size_bytes: int) -> None:
    node.tensors += 1
    node.elements += elements
    node.bytes += size_bytes
