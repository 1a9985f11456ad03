"""Checkpoints of a folder, and what each is, from their indexes alone.

No tensor is read, and torch is not needed. What is in one: `dcp.inspection.entries`.

Functions return data classes; the command line and the service render them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from dcp.calls.plain_errors import plain_errors
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
)
from dcp.storage.formats.format import BEGIN_BYTES
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import (
    index_of_file,
    index_of_folder,
    locate,
    naming_near_places,
    open_source,
)
from dcp.storage.formats.opening import open_index as _open_index
from dcp.storage.formats.registry import by_precedence, file_suffixes, formats, is_of_files
from dcp.storage.formats.views import DroppedPart, dropped_from
from dcp.storage.stores.base import FileInfo, Store
from dcp.storage.stores.opening import OpenWith, ParentFolder, SmallFiles, open_parent_folder
from dcp.storage.threads import WorkerThreads

_STEP = re.compile(r"([0-9]+)$")


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint of a folder.

    ``state`` is "committed", "incomplete" (data files that no save committed) or "unreadable" (``problem``
    says why); of weights without a commit, such as a torch.save file, "complete", or "unopened" in a quick
    listing; of `list_runs` "run", with the number of its ``checkpoints``. ``step`` is the number
    at the end of the name. ``bytes`` is the size of the files it refers to. What is not known is None.
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


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """A checkpoint as a whole; ``bytes`` are those of the tensors, ``file_bytes`` those of the files.

    ``rank_seconds`` are the durations of the save's phases by rank, none where the writer noted none, and
    ``rank_traffic`` what each rank asked of the storage's service until it had written its files: see
    `dcp.storage.stores.base.Store.traffic`. ``dropped`` is what was dropped from it since it was saved.
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
    """Read the index of the checkpoint under ``checkpoint_id``: a path, or a URL of a supported store.

    It may be a folder with a commit, or a file or folder of any other format (see
    `dcp.storage.formats.opening`).

    Args:
        checkpoint_id: The path or URL.
        rank: That rank's part of a save without collectives; None merges all parts.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        Names, dtypes, shapes and places of all that is in it.

    Raises:
        CheckpointNotFoundError: No save was committed there.
        CheckpointFormatError: Its metadata is damaged, or not of a format that is known.
    """
    return open_source(checkpoint_id, open_store=OpenWith(storage_options), rank=rank).index


@plain_errors
def list_checkpoints(
    checkpoint_id: str | os.PathLike[str],
    *,
    quick: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointSummary]:
    """List the checkpoints in a folder, by step and name; one alone if ``checkpoint_id`` is a checkpoint
    itself.

    Listed are its folders, and weights without a commit, of any format: of the folder and of those in it, and
    the folder's single files. Folders without files of a checkpoint are left out. An unreadable checkpoint is
    listed as such.

    Args:
        checkpoint_id: The path or URL of the folder.
        quick: No file is opened, and everything is by the listings: ``committed_seconds`` is the time of the
            commit object, ``bytes`` the size of all data files, and format, tensors and ranks are not known.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        A line a checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such folder.
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
    own = _save(store, files, quick=quick)  # no row for a place that cannot be listed itself
    if own is not None:
        return [own]
    root = open_parent_folder(checkpoint_id, open_store=opener)
    if not root.place.exists():
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

    # the weights of the folder itself: as a whole, and the files beside them one by one
    whole = _weights(store, files, quick=quick)
    is_readable = whole is not None and whole.state != "unreadable"
    known = [file.name for file in _folder_weights(files)] if is_readable else []
    jobs = [partial(of_folder, *folder) for folder in root.listings().items()]
    jobs += [partial(of_file, file) for file in _single_files(files, known)]
    found = [whole, *_results(jobs, 1 if quick else root.at_once)]
    summaries = [one for one in found if one is not None]
    return sorted(summaries, key=lambda one: (-1 if one.step is None else one.step, one.name))


def _results(jobs: Sequence[Callable[[], Any]], at_once: int) -> list[Any]:
    if at_once <= 1:
        return [job() for job in jobs]
    with WorkerThreads(at_once) as pool:
        return list(pool.map(lambda job: job(), jobs))


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
    """Return the save in a folder; None if it has nothing of one. ``files`` is its listing."""
    committed = [file for file in files if is_commit_object(file.name)]
    if committed and not quick:
        return _opened(store, store.url, partial(_open_index, store), files, "committed")
    data = [file for file in files if file.name.endswith(DATA_SUFFIX)]
    if not committed and not data:
        return None
    return _unopened(store.url, "committed" if committed else "incomplete", committed, data)


def _weights(store: Store, files: Sequence[FileInfo], *, quick: bool) -> CheckpointSummary | None:
    """Return the weights that a folder has in place of a save; None without any."""
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
    """Return the checkpoint of ``files`` by the listing alone; its time is the last of ``dated``."""
    name, step = name_and_step(url)
    seconds = max((file.modified_seconds for file in dated), default=None)
    return CheckpointSummary(name, url, state, step, seconds, bytes=sum(file.size_bytes for file in files))


def _opened(
    store: Store, url: str, read: Callable[[], CheckpointIndex | None], files: Sequence[FileInfo], state: str
) -> CheckpointSummary | None:
    """Return the checkpoint at ``url`` whose index is ``read``; None if there is none."""
    try:
        index = read()
    except CheckpointError as error:
        return _unreadable(url, error)
    if index is None:
        return None
    header, (name, step) = header_of(store, index, files, url=url), name_and_step(url)
    facts = header.committed_seconds, header.format, header.tensors, header.file_bytes, header.world_size
    return CheckpointSummary(name, url, state, step, *facts)


_PROVENANCE: Final = ("save_id", "torch_version", "dcphub_version", "world_size")


def header_of(
    store: Store,
    index: CheckpointIndex,
    files: Sequence[FileInfo] | None = None,
    *,
    url: str | None = None,
) -> CheckpointHeader:
    """Sum up the checkpoint of ``store``; ``files`` is its listing, where the caller has it already.

    ``url`` names a checkpoint that is one file of the store.
    """
    listing = {file.name: file for file in (store.list() if files is None else files)}
    provenance = index.provenance
    committed = provenance.get("time")
    return CheckpointHeader(
        url=store.url if url is None else url,
        format=index.format,
        **{name: provenance.get(name) for name in _PROVENANCE},
        committed_seconds=_committed_seconds(index, listing) if committed is None else committed,
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


def _committed_seconds(index: CheckpointIndex, listing: Mapping[str, FileInfo]) -> float | None:
    """Return the time at which the commit object was written; of files without one, that of the last of
    them."""
    names: Sequence[str] = [name for name in (METADATA_NAME, MANIFEST_NAME) if name in listing][:1]
    if is_of_files(index.format):
        names = index.files
    return max((listing[name].modified_seconds for name in names if name in listing), default=None)


def figures_by_rank(noted: object) -> tuple[dict[str, float], ...]:
    """Return the figures by rank that ``noted`` has, which need not be any: a manifest may come from a
    stranger."""
    if not isinstance(noted, list):
        return ()
    rows = [figures.items() if isinstance(figures, dict) else () for figures in noted]
    return tuple({str(name): float(one) for name, one in row if isinstance(one, int | float)} for row in rows)


_DEEPEST = 4
"""Folders below folders that are looked into for runs."""


@plain_errors
def list_runs(
    checkpoint_id: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointSummary]:
    """List the runs below a folder, however deep within four levels, by name; not the folder itself.

    Their ``state`` is "run" and their ``name`` relative to the folder; ``checkpoints`` is the number of those
    committed directly in them, ``committed_seconds`` the time of the last commit, and ``step`` that of the
    last commit whose name has one. What cannot be listed, and folders whose names begin with a dot, are
    passed over.

    Args:
        checkpoint_id: The path or URL of the folder.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        A line a run.

    Raises:
        CheckpointNotFoundError: There is no such folder.
        StorageError: The storage cannot be listed.
    """
    opener = OpenWith(storage_options)
    if locate(checkpoint_id, open_store=opener).file is not None:
        return []
    root = open_parent_folder(checkpoint_id, open_store=opener)
    return [_run_summary(*found) for found in _below(root, opener, "", 1) if found[2]]


@plain_errors
def list_below(
    checkpoint_id: str | os.PathLike[str],
    *,
    quick: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointSummary]:
    """List the checkpoints of a folder and of all folders below it, within four levels, as
    `list_checkpoints` has those of one; their names are relative to the folder.

    Args:
        checkpoint_id: The path or URL of the folder.
        quick: As for `list_checkpoints`.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        A line a checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such folder.
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
    """Yield the folders below that are no checkpoints, each with the committed ones directly in it."""
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


def _run_summary(name: str, run: ParentFolder, committed: Mapping[str, SmallFiles]) -> CheckpointSummary:
    times = {
        folder: max(info.modified_seconds for file, info in files.items() if is_commit_object(file))
        for folder, files in committed.items()
    }
    steps = {folder: step for folder in times if (step := name_and_step(folder)[1]) is not None}
    newest = max(steps, key=lambda folder: (times[folder], folder), default=None)
    step = None if newest is None else steps[newest]
    return CheckpointSummary(name, run.url, "run", step, max(times.values()), checkpoints=len(committed))


def _folder_weights(files: Sequence[FileInfo]) -> list[FileInfo]:
    """Return the files that are one set of weights together; as far as names tell."""
    shown = [file for file in files if not file.name.startswith(".")]
    for one in by_precedence(formats()):
        belongs = one.is_in_folder if one.names_suffice else one.marks_folder
        found = [file for file in shown if belongs(file.name)]
        if one.suffixes:  # what only lists the others is no weights
            found = [file for file in found if one.has_suffix(file.name)]
        if found:
            return found
    return []


def _single_files(files: Sequence[FileInfo], known: Collection[str]) -> list[FileInfo]:
    """Return the files that could each be weights, without those ``known`` as parts of the folder's."""
    shown = [file for file in files if not file.name.startswith(".") and file.name not in known]
    return [file for file in shown if file.name.lower().endswith(file_suffixes())]


def _is_weight_file(store: Store, file: FileInfo) -> bool:
    """Return whether the file begins as one of the formats that its name may be of: ``.bin`` may be
    anything."""
    if any(one.names_suffice and one.has_suffix(file.name) for one in formats()):
        return True
    try:
        begin, _ = store.read_start(file.name, BEGIN_BYTES)
        return any(one.begins_so(begin) for one in formats())
    except CheckpointError:  # the error shows when it is opened
        return True
