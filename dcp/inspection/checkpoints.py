"""Checkpoints in a folder, and entries of a checkpoint, from indexes only.

No tensor is read, and torch is not needed. Functions return data classes for the command line and the
service.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from dcp.storage.formats.format import BEGIN_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.opening import (
    index_of_file,
    index_of_folder,
    locate,
    naming_near_places,
    open_source,
)
from dcp.storage.formats.opening import open_index as _open_index
from dcp.storage.formats.plain import MAX_PLAIN_BYTES
from dcp.storage.formats.registry import by_precedence, file_suffixes, formats, is_of_files
from dcp.storage.formats.torch.archive import ObjectBlob
from dcp.storage.formats.torch.python_values import decode_value
from dcp.storage.formats.views import DroppedPart, dropped_from
from dcp.storage.stores.base import FileInfo, Store
from dcp.storage.stores.opening import OpenWith, ParentFolder, SmallFiles, open_parent_folder
from dcp.storage.threads import WorkerThreads

_STEP = re.compile(r"([0-9]+)$")


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint of a folder; unknown fields are None.

    Attributes:
        state: "committed", "incomplete" (data files without a commit), "unreadable" (see ``problem``),
            "complete" (weights without a commit, such as a torch.save file), "unopened" (quick listing), or
            "run" (`list_runs`).
        step: Number at the end of the name.
        bytes: Size of the referenced files.
        checkpoints: Number of checkpoints of a run.
        metrics: Metrics stored by `CheckpointManager.save`.
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
    checkpoints: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """Summary of a checkpoint.

    Attributes:
        bytes: Size of the tensors.
        file_bytes: Size of the files.
        rank_seconds: Durations of the save's phases by rank; empty if not recorded.
        rank_traffic: Requests of each rank to the object store: see `dcp.storage.stores.base.Store.traffic`.
        dropped: Parts dropped since the save.
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
    dropped: tuple[DroppedPart, ...] = ()


@plain_errors
def open_index(
    checkpoint_id: str | os.PathLike[str],
    *,
    rank: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CheckpointIndex:
    """Read the index of a checkpoint, without reading tensors.

    Args:
        checkpoint_id: Path or URL of a committed checkpoint, or of a file or folder in any supported format
            (see `dcp.storage.formats.opening`).
        rank: Rank of a save without collectives; None merges all ranks.
        storage_options: Options of the URL's file system, as for `dcp.save`.

    Returns:
        Names, dtypes, shapes and places of all entries. ``user`` holds the user's metadata, such as step and
        metrics.

    Raises:
        CheckpointNotFoundError: No committed checkpoint exists there.
        CheckpointFormatError: The metadata is damaged or has an unknown format.

    Examples:
        >>> dcp.open_index("run/step-00001000").user["metrics"]
    """
    return open_source(checkpoint_id, open_store=OpenWith(storage_options), rank=rank).index


@plain_errors
def list_checkpoints(
    checkpoint_id: str | os.PathLike[str],
    *,
    quick: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointSummary]:
    """List the checkpoints in a folder by step and name, including the folder itself.

    The list contains subfolders with checkpoints or weights of any format, and single weight files unless the
    folder is a checkpoint. Unreadable checkpoints are listed with the state "unreadable".

    Args:
        checkpoint_id: Path or URL of the folder.
        quick: Open no file: ``committed_seconds`` is the time of the commit object, ``bytes`` the size of all
            data files; format, tensors and ranks are unknown.
        storage_options: Options of the URL's file system, as for `dcp.save`.

    Returns:
        One summary for each checkpoint.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
        StorageError: The storage cannot be listed.
    """
    opener = OpenWith(storage_options)
    with naming_near_places(checkpoint_id, opener):
        return _list(checkpoint_id, opener, quick=quick)


def _list(checkpoint_id: str | os.PathLike[str], opener: OpenWith, *, quick: bool) -> list[CheckpointSummary]:
    place = locate(checkpoint_id, open_store=opener)
    store = place.store
    if place.file is not None:
        info = store.stat(place.file)
        found = [] if info is None else [_weight_file(store, info, quick=quick)]
        return [one for one in found if one is not None]
    files = store.list()
    own = _save(store, files, quick=quick)  # the folder itself is not listed if it is unreadable
    root = open_parent_folder(checkpoint_id, open_store=opener)
    if own is None and not root.place.exists():
        raise CheckpointNotFoundError(f"{root.url}: no such folder", path=root.url)

    def of_folder(name: str, listing: list[FileInfo] | None) -> CheckpointSummary | None:
        below = root.store(name)
        try:
            listing = below.list() if listing is None else listing
        except CheckpointError as error:
            return _unreadable(below.url, error)
        return _save(below, listing, quick=quick) or _weights(below, listing, quick=quick)

    def of_file(file: FileInfo) -> CheckpointSummary | None:
        return _weight_file(store, file, quick=quick) if quick or _is_weight_file(store, file) else None

    # the folder or its weights as a whole, then other files separately
    whole = own or _weights(store, files, quick=quick)
    is_readable = whole is not None and whole.state != "unreadable"
    known = [file.name for file in _folder_weights(files)] if is_readable else []
    jobs = [partial(of_folder, *folder) for folder in root.listings().items()]
    for file in files if own is None else ():
        is_shown = not file.name.startswith(".") and file.name not in known
        if is_shown and file.name.lower().endswith(file_suffixes()):
            jobs.append(partial(of_file, file))
    if quick or root.at_once == 1:
        found = [whole, *(job() for job in jobs)]
    else:
        with WorkerThreads(root.at_once) as pool:
            found = [whole, *pool.map(lambda job: job(), jobs)]
    summaries = [one for one in found if one is not None]
    return sorted(summaries, key=lambda one: (-1 if one.step is None else one.step, one.name))


def name_and_step(url: str) -> tuple[str, int | None]:
    """Return the last part of a path or URL, and the number at its end."""
    name = url.rstrip("/").rsplit("/", 1)[-1]
    stem = name.rpartition(".")[0] if name.lower().endswith(file_suffixes()) else name
    match = _STEP.search(stem)
    return name, int(match[1]) if match else None


def _unreadable(url: str, error: CheckpointError) -> CheckpointSummary:
    name, step = name_and_step(url)
    return CheckpointSummary(name, url, "unreadable", step, problem=str(error))


def _save(store: Store, files: Sequence[FileInfo], *, quick: bool) -> CheckpointSummary | None:
    """Return the save in a folder with the listing ``files``, or None."""
    committed = [file for file in files if is_commit_object(file.name)]
    if committed and not quick:
        return _opened(store, store.url, partial(_open_index, store), files, "committed")
    data = [file for file in files if file.name.endswith(DATA_SUFFIX)]
    state = "committed" if committed else "incomplete"
    return _unopened(store.url, state, committed, data) if committed or data else None


def _weights(store: Store, files: Sequence[FileInfo], *, quick: bool) -> CheckpointSummary | None:
    """Return the weights in a folder without a save, or None."""
    weights = _folder_weights(files)
    if weights and not quick:
        return _opened(store, store.url, partial(index_of_folder, store), files, "complete")
    return _unopened(store.url, "unopened", weights, weights) if weights else None


def _weight_file(store: Store, file: FileInfo, *, quick: bool) -> CheckpointSummary | None:
    url = store.path_of(file.name)
    if quick:
        return _unopened(url, "unopened", [file], [file])
    return _opened(store, url, partial(index_of_file, store, file.name), [file], "complete")


def _unopened(
    url: str, state: str, dated: Sequence[FileInfo], files: Sequence[FileInfo]
) -> CheckpointSummary:
    """Return the summary of ``files`` from the listing alone, with the newest time of ``dated``."""
    name, step = name_and_step(url)
    seconds = max((file.modified_seconds for file in dated), default=None)
    return CheckpointSummary(name, url, state, step, seconds, bytes=sum(file.size_bytes for file in files))


def _opened(
    store: Store, url: str, read: Callable[[], CheckpointIndex | None], files: Sequence[FileInfo], state: str
) -> CheckpointSummary | None:
    """Return the summary of the checkpoint at ``url`` with the index of ``read``, or None."""
    try:
        index = read()
    except CheckpointNotFoundError:  # each weight file is a separate checkpoint
        return None
    except CheckpointError as error:
        return _unreadable(url, error)
    if index is None:
        return None
    header, (name, step) = header_of(store, index, files, url=url), name_and_step(url)
    facts = header.committed_seconds, header.format, header.tensors, header.file_bytes, header.world_size
    return CheckpointSummary(name, url, state, step, *facts, metrics=metrics_of(index.user))


def metrics_of(user: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in the user metadata of a checkpoint, without values that are not numbers."""
    metrics = user.get("metrics")
    if type(metrics) is not dict:
        return {}
    numbers = {name: number_of(value) for name, value in metrics.items() if type(name) is str}
    return {name: value for name, value in numbers.items() if value is not None}


def number_of(value: Any) -> float | None:
    """Return ``value`` of a manifest as a float; None for other types and too large integers."""
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < 1 << 1023 else None


def header_of(
    store: Store,
    index: CheckpointIndex,
    files: Sequence[FileInfo] | None = None,
    *,
    url: str | None = None,
) -> CheckpointHeader:
    """Summarize the checkpoint of ``store``; ``files`` is an existing listing.

    ``url`` names a checkpoint in a single file of the store.
    """
    listing = {file.name: file for file in (store.list() if files is None else files)}
    provenance = index.provenance
    committed = provenance.get("time")
    if committed is None:  # time of the commit object; without one, of the newest file
        commits = [name for name in (METADATA_NAME, MANIFEST_NAME) if name in listing][:1]
        dated = index.files if is_of_files(index.format) else commits
        times = [listing[name].modified_seconds for name in dated if name in listing]
        committed = max(times, default=None)
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
        rank_seconds=figures_by_rank(provenance.get("rank_seconds")),
        rank_traffic=figures_by_rank(provenance.get("rank_traffic")),
        dropped=dropped_from(provenance),
    )


def figures_by_rank(noted: object) -> tuple[dict[str, float], ...]:
    """Return the valid figures by rank in ``noted``, which may come from an untrusted manifest."""
    if not isinstance(noted, list):
        return ()
    rows = [figures.items() if isinstance(figures, dict) else () for figures in noted]
    return tuple({str(name): float(one) for name, one in row if isinstance(one, int | float)} for row in rows)


_DEEPEST = 4
"""Levels of subfolders searched for runs."""


@plain_errors
def list_runs(
    checkpoint_id: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointSummary]:
    """List the runs below a folder, up to four levels deep, by name.

    ``state`` is "run" and ``name`` is relative to the folder. ``checkpoints`` counts the commits directly in
    the run, ``committed_seconds`` is the time of the last commit, ``step`` the last step number in a name.
    Hidden and unreadable folders are skipped.

    Args:
        checkpoint_id: Path or URL of the folder.
        storage_options: Options of the URL's file system, as for `dcp.save`.

    Returns:
        One summary for each run.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
        StorageError: The storage cannot be listed.
    """
    opener = OpenWith(storage_options)
    if locate(checkpoint_id, open_store=opener).file is not None:
        return []
    root, found = open_parent_folder(checkpoint_id, open_store=opener), []
    for name, run, committed in _below(root, opener, "", 1):
        times = {
            folder: max(info.modified_seconds for file, info in files.items() if is_commit_object(file))
            for folder, files in committed.items()
        }
        steps = {folder: step for folder in times if (step := name_and_step(folder)[1]) is not None}
        newest = max(steps, key=lambda folder: (times[folder], folder), default="")
        if committed:
            last, count = max(times.values()), len(committed)
            found.append(CheckpointSummary(name, run.url, "run", steps.get(newest), last, checkpoints=count))
    return found


@plain_errors
def list_below(
    checkpoint_id: str | os.PathLike[str],
    *,
    quick: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointSummary]:
    """List the checkpoints of a folder and of its subfolders, up to four levels deep, as `list_checkpoints`;
    names are relative to the folder.

    Args:
        checkpoint_id: Path or URL of the folder.
        quick: As for `list_checkpoints`.
        storage_options: Options of the URL's file system, as for `dcp.save`.

    Returns:
        One summary for each checkpoint.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
        StorageError: The storage cannot be listed.
    """
    opener = OpenWith(storage_options)
    found = list_checkpoints(checkpoint_id, quick=quick, storage_options=storage_options)
    if locate(checkpoint_id, open_store=opener).file is not None:
        return found
    for name, run, _ in _below(open_parent_folder(checkpoint_id, open_store=opener), opener, "", 1):
        in_it = list_checkpoints(run.url, quick=quick, storage_options=storage_options)
        found += [replace(row, name=f"{name}/{row.name}") for row in in_it if row.url != run.url]
    return found


def _below(
    root: ParentFolder,
    opener: OpenWith,
    prefix: str,
    depth: int,
    looked: Mapping[str, SmallFiles] | None = None,
) -> Iterator[tuple[str, ParentFolder, dict[str, SmallFiles]]]:
    """Yield subfolders that are not checkpoints, with their committed checkpoints."""
    looked = root.look() if looked is None else looked
    for name in root.names():
        if name.startswith(".") or _is_committed(looked.get(name, {})):
            continue
        run = open_parent_folder(f"{root.url.rstrip('/')}/{name}", open_store=opener)
        try:
            in_run = run.look()
        except CheckpointError:
            continue
        yield prefix + name, run, {name: files for name, files in in_run.items() if _is_committed(files)}
        if depth < _DEEPEST:
            yield from _below(run, opener, f"{prefix}{name}/", depth + 1, in_run)


def _is_committed(files: SmallFiles) -> bool:
    return any(map(is_commit_object, files))


def _folder_weights(files: Sequence[FileInfo]) -> list[FileInfo]:
    """Return the files that form one set of weights, judged by name."""
    shown = [file for file in files if not file.name.startswith(".")]
    for one in by_precedence(formats()):
        belongs = one.is_in_folder if one.names_suffice else one.marks_folder
        found = [file for file in shown if belongs(file.name)]
        if one.suffixes:  # an index of shards contains no weights itself
            found = [file for file in found if one.has_suffix(file.name)]
        if found:
            return found
    return []


def _is_weight_file(store: Store, file: FileInfo) -> bool:
    """Test whether the file begins as one of the formats of its suffix."""
    if any(one.names_suffice and one.has_suffix(file.name) for one in formats()):
        return True
    try:
        begin, _ = store.read_start(file.name, BEGIN_BYTES)
        return any(one.begins_so(begin) for one in formats())
    except CheckpointError:  # opening the file raises the error
        return True


# -- entries of a checkpoint ---------------------------------------------------------------------------------

_Place: TypeAlias = tuple[int, int, int]

_BLOBS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor: global shape, and the number, bytes and files of its chunks."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: int
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ObjectRow:
    """One value that is not a tensor. ``value`` is valid if ``is_plain`` or harmless; other values stay
    pickled with ``bytes``."""

    fqn: str
    is_plain: bool
    value: Any
    bytes: int
    file: str | None


@dataclass(slots=True)
class ModuleNode:
    """A module: all names below a dotted prefix. ``tensor`` is set if the prefix is a tensor's name."""

    name: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    tensor: TensorRow | None = None
    children: list[ModuleNode] = field(default_factory=list)


def tensor_rows(index: CheckpointIndex) -> list[TensorRow]:
    """Return all tensors in the order of the index."""
    sizes = np.zeros(index.tensor_count, dtype=np.int64)
    np.add.at(sizes, index.chunk_tensors, index.payload_lengths)
    pairs = np.unique(np.stack([index.chunk_tensors, index.chunk_files]), axis=1)
    ends = np.searchsorted(pairs[0], np.arange(index.tensor_count + 1)).tolist()
    names = [index.files[file] for file in pairs[1].tolist()]
    columns = zip(index.fqns, np.diff(index.chunk_start).tolist(), sizes.tolist(), strict=True)
    rows = []
    for row, (fqn, chunks, size_bytes) in enumerate(columns):
        files = tuple(names[ends[row] : ends[row + 1]])
        rows.append(TensorRow(fqn, index.dtype(row).name, index.shape(row), chunks, size_bytes, files))
    return rows


def object_rows(
    store: Store,
    index: CheckpointIndex,
    fqns: Sequence[str] | None = None,
    *,
    limit_bytes: int = MAX_PLAIN_BYTES,
) -> list[ObjectRow]:
    """List the values ``fqns``, by default all in the order of the index.

    Plain values are decoded, and harmless pickles of up to ``limit_bytes``.
    """
    objects, position = index.objects, index.objects.position
    chosen = range(len(objects)) if fqns is None else [position[fqn] for fqn in fqns]
    columns = (column[chosen].tolist() for column in (objects.files, objects.offsets, objects.lengths))
    places = list(zip(*columns, strict=True))
    plain = objects.plain[chosen].tolist()
    pickled = {place for place, at in zip(places, plain, strict=True) if at == UNKNOWN}
    decoded = _plain_values(store, index, [one for one in sorted(pickled) if one[2] <= limit_bytes])
    values = {at: decode_value(objects.values[at]) for at in {*plain} - {UNKNOWN}}
    rows = []
    for row, place, at in zip(chosen, places, plain, strict=True):
        fqn, size_bytes = objects.fqns[row], place[2]
        name = index.files[place[0]] if place[0] != UNKNOWN else None
        if at == UNKNOWN:
            rows.append(ObjectRow(fqn, place in decoded, decoded.get(place), size_bytes, name))
        else:
            size_bytes = len(objects.values[at]) if name is None else size_bytes
            rows.append(ObjectRow(fqn, True, values[at], size_bytes, name))
    return rows


def _plain_values(store: Store, index: CheckpointIndex, places: list[_Place]) -> dict[_Place, Any]:
    """Decode harmless values at ``places`` (file, offset, length) without executing pickles."""
    found: dict[_Place, Any] = {}
    with ReadEngine(store, index, threads=store.read_profile.threads or 1) as engine:
        for first in range(0, len(places), _BLOBS_AT_ONCE):
            some = places[first : first + _BLOBS_AT_ONCE]
            for place, blob in zip(some, engine.read_blobs(some), strict=True):
                # not harmless, or not an object of torch.save
                with contextlib.suppress(CheckpointFormatError):
                    found[place] = ObjectBlob(blob).value()
    return found


def module_tree(rows: Iterable[TensorRow]) -> ModuleNode:
    """Return tensors grouped by the dots in their names, with sums; the root has an empty name."""
    root = ModuleNode("")
    by_path: dict[tuple[str, ...], ModuleNode] = {}
    for row in rows:
        parts, node = tuple(row.fqn.split(".")), root
        for depth in range(len(parts) + 1):
            if depth and parts[:depth] not in by_path:
                by_path[parts[:depth]] = ModuleNode(parts[depth - 1])
                node.children.append(by_path[parts[:depth]])
            node = by_path[parts[:depth]] if depth else root
            node.tensors += 1
            node.elements += math.prod(row.shape)
            node.bytes += row.bytes
        node.tensor = row
    return root
