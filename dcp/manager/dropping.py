"""Drop of a part of a checkpoint, such as its optimizer, without rewriting the rest. Does not import torch.

1. Publish a new manifest and `.metadata` without the part, by the commit of a save (`dcp.storage.commit`).
The commit compares with the state at the beginning of the drop. The provenance records the drop.

2. Remove files that contain dropped payloads only. After a crash, `finish_drop` removes them.

A file with both dropped and remaining payloads stays. With ``rewrite``, its remaining payloads are copied to
a new file before the commit and verified. The id of the save does not change. Readers that find a file
missing read the index again.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dcp.inspection.verification import PayloadChecks, VerifyReport
from dcp.manager.retention import Part, Retention, plan
from dcp.planners.load.selection import Selection
from dcp.steps import StepFolders, read_notes
from dcp.storage import commit
from dcp.storage.commit_names import DATA_NAME, MANIFEST_NAME, METADATA_NAME
from dcp.storage.engine.write import data_file_name
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.opening import MAX_TORCH_METADATA_BYTES, has_checkpoint, open_index
from dcp.storage.formats.registry import DCP, TORCH_DCP
from dcp.storage.formats.views import DroppedPart, dropped_from, noted_in, without
from dcp.storage.geometry.strides import Int64
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, Store
from dcp.storage.stores.opening import ParentFolder, open_parent_folder

logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 8 << 20
_ASIDE_SECONDS: Final = 900.0
"""Upper bound of the time to write and publish a file."""

OWN_ASIDE: Final = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}[0-9a-f]{{32}}")
"""Names of temporary files of dcp before their publication."""

_ALIGNED_BYTES: Final = 64
"""Alignment of payloads, kept in copies."""

Outcome = Literal["dropped", "absent", "pinned", "shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Result or forecast of a drop.

    Attributes:
        outcome: "dropped"; "absent": the checkpoint has no such part; "pinned"; "shared": all files of the
            part also contain remaining payloads.
        parts: Names of existing parts.
        files: Removed files.
        freed_bytes: Bytes of removed files.
        shared_bytes: Bytes of the parts left in shared files.
        rewritten_bytes: Bytes copied to new files, not counted as freed.
    """

    url: str
    outcome: Outcome
    parts: tuple[DroppedPart, ...] = ()
    files: tuple[str, ...] = ()
    freed_bytes: int = 0
    shared_bytes: int = 0
    rewritten_bytes: int = 0


def drop_parts(
    store: Store, parts: Sequence[Part], now_seconds: float, *, rewrite: bool = False, dry_run: bool = False
) -> Drop:
    """Drop ``parts`` of the checkpoint in ``store``, and finish an earlier drop.

    With ``rewrite``, shared files are replaced by copies of the remaining payloads. With ``dry_run``, nothing
    changes and freed bytes are estimated. Repeat the call after any error or crash. Raises
    CheckpointNotFoundError, CheckpointConflictError if a save or another drop committed first,
    CheckpointError for parts saved without collectives, OptionError if no tensor would remain,
    CorruptCheckpointError for damage in copied payloads, and errors of the store.
    """
    # Read the versions before the index, so that the commit detects a save in between.
    previous = commit.previous_state(store, commit.Names())
    index = open_index(store)
    if not previous.exists:
        raise CheckpointError(
            f"{store.url} was saved without collectives and has no single commit to replace; use "
            "dcp convert --to dcp --exclude ... instead",
            path=store.url,
        )
    before = {info.name: info for info in store.list()}
    names, found = _entries_of(index, parts, now_seconds)
    if not names:
        files, freed = ((), 0) if dry_run else finish_drop(store)
        return Drop(url=store.url, outcome="absent", files=files, freed_bytes=freed)
    if names.issuperset(index.fqns):
        raise OptionError(
            f"{store.url}: dropping {', '.join(part.name for part in found)} would leave no tensor; use dcp "
            "rm to remove the checkpoint",
            path=store.url,
        )
    if _is_pinned(store):
        return Drop(url=store.url, outcome="pinned", parts=found)
    after = without(index, names)
    gone = [name for name in index.files if name not in after.files]
    freed, rewritten, copies = _size(before, gone), 0, list[str]()
    shared, shared_bytes = _shared(index, after, names)
    if rewrite:
        rewritten = sum(_layout(*_records(after, name)[2:])[-1] for name in shared)
        gone, copies, shared_bytes = [*gone, *shared], shared, 0
        freed = _size(before, gone) - rewritten
    drop = Drop(
        url=store.url,
        outcome="dropped" if gone or rewrite else "shared",
        parts=found,
        files=tuple(gone),
        freed_bytes=freed,
        shared_bytes=shared_bytes,
        rewritten_bytes=rewritten,
    )
    if dry_run or drop.outcome == "shared":
        return drop
    return _carry_out(store, drop, index, after, previous, before, copies)


def _carry_out(
    store: Store,
    drop: Drop,
    index: CheckpointIndex,
    after: CheckpointIndex,
    previous: commit.Previous,
    before: Mapping[str, FileInfo],
    shared: Sequence[str],
) -> Drop:
    """Publish ``after`` with copies of the shared files, and remove the dropped files.

    A checkpoint of stock torch gets dcp's format, which records the drop.
    """
    provenance: dict[str, Any] = dict(after.provenance)
    for part in drop.parts:
        provenance = noted_in(provenance, part)
    if index.format == TORCH_DCP.name:
        seconds = before[METADATA_NAME].modified_seconds if METADATA_NAME in before else 0.0
        provenance = {"save_id": uuid.uuid4().hex[:8], "time": seconds, **provenance}
    after, copied = replace(after, format=DCP.name, provenance=provenance), tuple[str, ...]()
    try:
        if shared:
            after, copied = _with_copies(store, after, shared)
            if _is_pinned(store):  # pinned during the copy
                raise CheckpointConflictError(f"{store.url} was pinned during the drop", path=store.url)
        _publish(store, after, previous)
    except BaseException as error:
        if not (isinstance(error, CheckpointError) and error.committed):
            store.delete_all(copied)
        if isinstance(error, CheckpointNotFoundError):  # another commit has removed its predecessor's files
            then = commit.previous_state(store, commit.Names())
            if then.exists and (then.manifest, then.metadata) != (previous.manifest, previous.metadata):
                raise CheckpointConflictError(
                    f"{store.url}: a save or another drop came first; the checkpoint was modified "
                    "concurrently",
                    path=store.url,
                ) from error
        raise
    now = {info.name: info for info in store.list()}
    _remove_aside(store, now)
    gone = tuple(name for name in drop.files if name in before and name not in now)
    rewritten = _size(now, copied)
    return replace(drop, files=gone, freed_bytes=_size(before, gone) - rewritten, rewritten_bytes=rewritten)


def finish_drop(store: Store) -> tuple[tuple[str, ...], int]:
    """Finish a drop that crashed after its commit; return removed files and their bytes.

    `.metadata` is updated first, so that stock torch never sees a missing file.
    """
    previous = commit.previous_state(store, commit.Names())
    if previous.manifest is None:
        return (), 0
    index = open_index(store)
    if not dropped_from(index.provenance) or index.format != DCP.name:
        return (), 0
    before = {info.name: info for info in store.list()}
    owners = {owner_of(name) for name in index.files} | {index.provenance.get("save_id")}
    replaced = index.provenance.get("replaced_files", [])
    left = {name for name in before if owner_of(name) in owners - {None}}
    left |= before.keys() & set(replaced) if isinstance(replaced, list) else set()
    left -= {*index.files}
    if not left and not _is_stale(store, index, before):
        return (), 0
    _publish(store, index, replace(previous, files=tuple(sorted({*previous.files, *left}))))
    now = {info.name: info for info in store.list()}
    _remove_aside(store, now)
    gone = tuple(sorted(before.keys() - now.keys()))
    return gone, _size(before, gone)


def _is_pinned(store: Store) -> bool:
    notes = read_notes(store)
    if notes.deleting is not None:
        raise CheckpointError(
            f"{store.url} is being deleted; run dcp gc to finish the deletion", path=store.url
        )
    return notes.pinned


def _entries_of(
    index: CheckpointIndex, parts: Sequence[Part], seconds: float
) -> tuple[set[str], tuple[DroppedPart, ...]]:
    """Return the names of the entries of ``parts``, and a note for each existing part."""
    names: set[str] = set()
    found = []
    for part in parts:
        selection = Selection.of(part.patterns, None)
        own = {name for name in (*index.fqns, *index.objects.fqns) if selection and selection.selects(name)}
        own -= names
        if own:
            names |= own
            rows = _rows_of(index, own)
            size_bytes = int(index.payload_lengths[rows[index.chunk_tensors]].sum())
            tensors = int(rows.sum())
            note = part.name, part.patterns, seconds, tensors, len(own) - tensors, size_bytes
            found.append(DroppedPart(*note))
    return names, tuple(found)


def _rows_of(index: CheckpointIndex, names: Collection[str]) -> npt.NDArray[np.bool_]:
    """Return a mask of the tensors in ``names``."""
    return np.array([name in names for name in index.fqns], np.bool_)


def _shared(index: CheckpointIndex, after: CheckpointIndex, names: Collection[str]) -> tuple[list[str], int]:
    """Return files with both payloads of ``names`` and remaining payloads, and the bytes of the former.

    Payloads also used by a remaining tensor do not count.
    """
    dropped = _rows_of(index, names)[index.chunk_tensors]
    holding = {index.files[number] for number in set(index.chunk_files[dropped].tolist())}
    files = [name for name in after.files if name in holding]
    inside = dropped & np.isin(index.chunk_files, [index.files.index(name) for name in files])
    places = list(zip(index.chunk_files.tolist(), index.record_offsets.tolist(), strict=True))
    kept = set(compress(places, (~dropped).tolist()))
    own = dict(compress(zip(places, index.record_lengths.tolist(), strict=True), inside))
    return files, sum(length for place, length in own.items() if place not in kept)


def _size(listing: Mapping[str, FileInfo], names: Iterable[str]) -> int:
    """Sum the listed sizes of files."""
    return sum(listing[name].size_bytes for name in names if name in listing)


def _publish(store: Store, index: CheckpointIndex, previous: commit.Previous) -> None:
    commit.commit(
        store,
        index,
        # A concurrent save fails at its commit and removes its own files.
        replace(previous, strays=(), uploads=()),
        names=commit.Names(),
        save_id=str(index.provenance.get("save_id", "")),
        durable=True,
        torch_compatible=previous.metadata is not None or index.torch_metadata_crc is not None,
    )


def _remove_aside(store: Store, now: Mapping[str, FileInfo]) -> None:
    """Remove old temporary files of killed publishes. Younger files may still be published."""
    published = now[MANIFEST_NAME].modified_seconds if MANIFEST_NAME in now else 0.0
    old = {name for name, info in now.items() if info.modified_seconds < published - _ASIDE_SECONDS}
    for name, error in store.delete_all(sorted(filter(OWN_ASIDE.fullmatch, old))).items():
        logger.warning("%s: could not delete %s: %s", store.url, name, error)


def owner_of(name: str) -> str | None:
    """Return the save id in the name of a data file of dcp; None for other files."""
    match = DATA_NAME.fullmatch(name)
    return None if match is None else match["owner"]


def _is_stale(store: Store, index: CheckpointIndex, before: Mapping[str, FileInfo]) -> bool:
    """Return whether a crash separated the manifest from its `.metadata`."""
    if index.torch_metadata_crc is None or METADATA_NAME not in before:
        return index.torch_metadata_crc is not None
    data = store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES)
    return crc32(data) == index.replaced_torch_metadata_crc != index.torch_metadata_crc


# -- copies of what stays of a file --------------------------------------------------------------------------


def _with_copies(
    store: Store, index: CheckpointIndex, shared: Sequence[str]
) -> tuple[CheckpointIndex, tuple[str, ...]]:
    """Return ``index`` with copies of the files ``shared``, and the copies' names. Copies are read back and
    compared.
    """
    save_id = uuid.uuid4().hex[:8]
    files, sizes = list(index.files), index.file_sizes.copy()
    records, payloads = index.record_offsets.copy(), index.payload_offsets.copy()
    values = index.objects
    offsets = values.offsets.copy()
    copied: list[str] = []
    try:
        for name in shared:
            number = index.files.index(name)
            chunks, objects, begins, lengths = _records(index, name)
            copied.append(data_file_name(0, number, save_id))
            runs, moved, sizes[number] = _copy(store, name, copied[-1], begins, lengths)
            shift = moved[np.searchsorted(runs, begins, side="right") - 1]
            records[chunks] += shift[: len(chunks)]
            known = payloads[chunks] != UNKNOWN
            payloads[chunks[known]] += shift[: len(chunks)][known]
            offsets[objects] += shift[len(chunks) :]
            files[number] = copied[-1]
        store.sync()
        found = replace(
            index,
            files=files,
            file_sizes=sizes,
            record_offsets=records,
            payload_offsets=payloads,
            objects=replace(values, offsets=offsets),
        )
        _verify(store, found, copied)
    except BaseException:
        store.delete_all(copied)
        raise
    return found, tuple(copied)


def _records(index: CheckpointIndex, name: str) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the chunks and the values in a file, and the begins and lengths of all their ranges."""
    number, values = index.files.index(name), index.objects
    chunks = np.flatnonzero(index.chunk_files == number)
    objects = np.flatnonzero(values.files == number)
    begins = np.concatenate([index.record_offsets[chunks], values.offsets[objects]])
    lengths = np.concatenate([index.record_lengths[chunks], values.lengths[objects]])
    return chunks, objects, begins, lengths


def _layout(begins: Int64, lengths: Int64) -> tuple[Int64, Int64, Int64, int]:
    """Lay out the copy of ranges of a file, touching ranges as one run: begins, ends, targets, total size."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate((begins + lengths)[order])
    first = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1]]))
    runs, stops = begins[first], np.concatenate([ends[first[1:] - 1], ends[-1:]])
    places, size = np.zeros(len(runs), np.int64), 0
    for at, (begin, end) in enumerate(zip(runs.tolist(), stops.tolist(), strict=True)):
        places[at] = size + (begin - size) % _ALIGNED_BYTES
        size = int(places[at]) + end - begin
    return runs, stops, places, size


def _copy(store: Store, name: str, target: str, begins: Int64, lengths: Int64) -> tuple[Int64, Int64, int]:
    """Copy ranges of a file as `_layout` has them: (where the runs began, by how much each is moved, the size
    of the copy)."""
    runs, stops, places, size = _layout(begins, lengths)
    with (
        store.open_read(name) as source,
        store.create(target, durable=True, expected_bytes=size) as copy,
    ):
        for begin, end, place in zip(runs.tolist(), stops.tolist(), places.tolist(), strict=True):
            if place > copy.position:
                copy.write(bytes(place - copy.position))
            for position in range(begin, end, _PIECE_BYTES):
                copy.write(source.pread(min(_PIECE_BYTES, end - position), position))
        copy.finish()
    return runs, places - runs, size


def _verify(store: Store, index: CheckpointIndex, copied: Sequence[str]) -> None:
    """Raise CorruptCheckpointError unless the files ``copied`` match their checksums."""
    numbers = [index.files.index(name) for name in copied]
    tensors = set(index.chunk_tensors[np.isin(index.chunk_files, numbers)].tolist())
    values = np.isin(index.objects.files, numbers)
    others = {name for row, name in enumerate(index.fqns) if row not in tensors}
    others |= {name for name, is_in in zip(index.objects.fqns, values.tolist(), strict=True) if not is_in}
    report = VerifyReport(store.url)
    listing = {info.name: info for info in store.list()}
    PayloadChecks(store, without(index, others), listing, report, None).run(None)
    if report.faults:
        raise CorruptCheckpointError(
            f"{store.url}: nothing is dropped, because remaining entries are damaged: "
            + "; ".join(found.message for found in report.faults[:3]),
            path=store.url,
        )


# -- where to drop from --------------------------------------------------------------------------------------


def to_prune(
    uri: str, retention: Retention, *, open_store: OpenStore = open_store
) -> list[tuple[Store, tuple[Part, ...]]]:
    """Return the parts to drop at ``uri``, oldest step first, without changing anything.

    For a run, these are the parts that ``retention`` does not keep. For a checkpoint, these are its parts.
    Raises CheckpointNotFoundError if ``uri`` has neither.
    """
    store = open_store(uri)
    folders = steps_of(open_parent_folder(uri, open_store=open_store))
    if states := folders.survey():
        planned = plan(retention, states, time.time())
        return [(folders.store(step), parts) for step, parts in planned.drop.items()]
    if has_checkpoint(store):
        return [(store, retention.dropping)]
    raise CheckpointNotFoundError(
        f"{store.url} is neither a checkpoint nor a run: no subfolder has the name of a step",
        path=store.url,
    )


def steps_of(root: ParentFolder) -> StepFolders:
    """Return the steps of a run with any naming, by the most frequent prefix before the number.

    Raises OptionError if two prefixes are equally frequent.
    """
    found: dict[str, list[str]] = {}
    for name in root.look():
        before = re.sub(r"[0-9]{1,18}\Z", "", name)
        if before != name:
            found.setdefault(before, []).append(name.removeprefix(before))
    counts = sorted(((len(steps), before) for before, steps in found.items()), reverse=True)
    if len(counts) > 1 and counts[0][0] == counts[1][0]:
        names = ", ".join(f"{before}..." for _, before in counts)
        raise OptionError(f"{root.url} contains several runs ({names}): pass the paths of the checkpoints")
    before = counts[0][1] if counts else "step-"
    widths = {len(step) for step in found.get(before, ())}
    width = widths.pop() if len(widths) == 1 else 1  # zero-padded width, if equal
    return StepFolders(root, lambda step: f"{before}{step:0{width}d}")
