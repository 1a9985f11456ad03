"""Verification: a checkpoint's bytes are compared with those that were committed. Every block is read, torch
is not needed.

Checked are the index itself, the files (missing, of the wrong size, unknown), every payload against its
checksums, what surrounds it in its record (stock torch goes by that), `.metadata` against the manifest, and
the digests that this tells against the tensors: from the same bytes, but for those that are cut across their
rows or tied, which are read once more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.findings import Finding, ReportBytes, VerifyReport, kind_of
from dcp.inspection.payload_checks import PayloadChecks, StreamedSums
from dcp.inspection.values.digests import CheckpointDigests, check_digests, digests
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.planners.load.selection import Patterns
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, NOTES_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.opening import (
    MAX_TORCH_METADATA_BYTES,
    SourcePlace,
    index_at,
    locate,
    naming_near_places,
)
from dcp.storage.formats.registry import TORCH_DCP, is_of_files
from dcp.storage.geometry.boxes import BoxSet, cut_overlaps, overlapping_pairs
from dcp.storage.geometry.strides import expand_ranges, row_products
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, Store
from dcp.storage.stores.opening import OpenWith

__all__ = ["Finding", "ReportBytes", "VerifyReport", "verify", "verify_place", "verify_store"]

_MOST_AGAIN: Final = 4
_SMALL_BYTES: Final = 64 << 20
_RANK_LOCAL = re.compile(r"__[0-9]+(\.manifest\.msgpack|\.metadata)")


@plain_errors
def verify(
    checkpoint_id: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    only: Patterns | None = None,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    storage_options: Mapping[str, Any] | None = None,
    options_of_against: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Read and check everything of a checkpoint; what is wrong becomes a `Finding`.

    Args:
        checkpoint_id: A path or URL: a checkpoint, a torch.save file, a safetensors file, or a Hugging Face
            folder.
        against: Another one, of any format and sharding, that is to have the same tensors: digests of this
            one's bytes are compared with that one's.
        only: Shell globs on the names of ``against``: what they match, and everything below, is to be here,
            as the weights of a training state. None is all of it.
        threads: None is as many as the store likes, on a disk 2; each takes up to 8 MiB of memory.
        progress: A function that gets the bytes done and those in all.
        storage_options: Of the file system of a URL, as for `dcp.save`; for both, unless
            ``options_of_against`` are given.
        options_of_against: Those of ``against``.

    Returns:
        What was read, compared and found; damage is no exception.

    Raises:
        CheckpointNotFoundError: Nothing is committed there.
        CheckpointConflictError: It was replaced meanwhile.
        PlanError: ``only`` selects nothing, or there is nothing to compare with.
        StorageError: The store as a whole cannot be read.
    """
    if only is not None and against is None:
        raise OptionError("only is about against, which is missing")
    opener = OpenWith(storage_options)
    with naming_near_places(checkpoint_id, opener):
        place = locate(checkpoint_id, open_store=opener)
        if against is None:
            return verify_place(place, threads=threads, progress=progress)
        options = storage_options if options_of_against is None else options_of_against
        other = partial(digests, against, only=only, storage_options=options)
        return verify_place(place, threads=threads, progress=progress, against=other)


def verify_store(store: Store) -> VerifyReport:
    """`verify` of the checkpoint in ``store``."""
    return verify_place(SourcePlace(store))


def verify_place(
    place: SourcePlace,
    *,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    against: Callable[[], CheckpointDigests] | None = None,
    with_digest: bool = False,
) -> VerifyReport:
    """`verify` of the checkpoint at ``place``; ``against`` is asked for if its bytes are right. With
    ``with_digest`` the report has that of all tensors, whatever the format, unless much more would have to be
    read again than is stored, as of views that repeat their elements."""
    store, report = place.store, VerifyReport(place.url)
    try:
        index = index_at(place)
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        report.findings.append(Finding(kind_of(error, "index"), str(error), error.path or None))
        return report
    listing = {file.name: file for file in store.list()}
    if is_of_files(index.format):  # what else is there is no concern of theirs
        listing = {name: listing[name] for name in index.files if name in listing}
    report.files, report.tensors = len(index.files), index.tensor_count
    report.findings += _check_metadata(store, index, listing)
    report.findings += check_files(index, listing)
    report.findings += _check_parts(index)
    sums = StreamedSums(index) if with_digest or against is not None or any(index.digests) else None
    try:
        PayloadChecks(store, index, listing, report, progress, sums).run(threads)
    except CheckpointNotFoundError as error:  # deleted since it was listed
        name = error.path.rpartition("/")[2]
        report.findings.append(Finding("missing-file", f"{name} is missing", name or None))
    if report.ok and sums is not None:
        other = None if against is None else against()
        with_digest = with_digest and sums.left_bytes <= _MOST_AGAIN * report.bytes + _SMALL_BYTES
        try:
            with TensorReader(store, index, verify="full", name=place.url) as reader:
                found = check_digests(reader, sums.sums, other, is_all=with_digest)
            report.findings += found.findings
            report.digest = found.digest if report.ok else None
        except CorruptCheckpointError as error:  # also of tensors of which a part is nowhere
            report.findings.append(Finding(kind_of(error, "index"), str(error), fqn=error.fqn or None))
    if report.findings and _was_replaced(place, index):
        raise CheckpointConflictError(
            f"{place.url} was replaced while it was being verified; verify it again", path=place.url
        )
    report.findings.sort(key=lambda found: (found.file or "", found.offset or 0))
    return report


def _was_replaced(place: SourcePlace, index: CheckpointIndex) -> bool:
    """Return whether another checkpoint is there than that of ``index``; one that is gone or damaged is
    not."""
    try:
        return encode_manifest(index_at(place)) != encode_manifest(index)
    except CheckpointError:
        return False


def _check_metadata(store: Store, index: CheckpointIndex, listing: dict[str, FileInfo]) -> Iterator[Finding]:
    if MANIFEST_NAME not in listing:
        return
    if index.format == TORCH_DCP.name:
        yield Finding(
            "metadata",
            f"stock torch has saved over this checkpoint; {MANIFEST_NAME} is of the save before and ignored",
            MANIFEST_NAME,
        )
    elif index.torch_metadata_crc is not None:
        if METADATA_NAME not in listing:
            yield Finding(
                "metadata", f"{METADATA_NAME} is missing: stock torch cannot load this", METADATA_NAME
            )
            return
        crc = crc32(store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES))
        if crc == index.torch_metadata_crc:
            return
        if crc == index.replaced_torch_metadata_crc:
            what = "is still that of the save which this one replaced: stock torch would load that one"
        else:
            what = "differs from what was committed: it is damaged, and stock torch would trust it"
        yield Finding("metadata", f"{METADATA_NAME} {what}", METADATA_NAME)


def _check_parts(index: CheckpointIndex) -> Iterator[Finding]:
    """Yield tensors of which the index has fewer elements than they have, as where one rank's part was
    lost."""
    held = np.zeros(index.tensor_count, np.int64)
    several = np.diff(index.chunk_start)[index.chunk_tensors] > 1
    once = np.flatnonzero(~several)
    volumes = row_products(index.chunk_sizes, index.box_start)
    held[index.chunk_tensors[once]] = volumes[once]
    ndims = index.ndims[index.chunk_tensors]
    for ndim in np.unique(ndims[several]).tolist():
        rows = np.flatnonzero(several & (ndims == ndim))
        flat = expand_ranges(index.box_start[rows], ndims[rows])
        low = index.chunk_offsets[flat].reshape(-1, ndim)
        boxes = BoxSet(index.chunk_tensors[rows], low, low + index.chunk_sizes[flat].reshape(-1, ndim))
        try:
            _, parts = cut_overlaps(boxes, *overlapping_pairs(boxes))  # some foreign checkpoints have such
        except PlanError as error:
            yield Finding("index", f"{error}")
            return
        np.add.at(held, parts.groups, np.prod(parts.high - parts.low, axis=1, dtype=np.int64))
    sizes = row_products(index.shape_values, index.shape_start)
    for row in np.flatnonzero(held < sizes).tolist():
        missing = int(sizes[row] - held[row])
        shown = f"{index.fqns[row]!r}: {missing:,} of {int(sizes[row]):,} elements are nowhere"
        yield Finding("index", shown, fqn=index.fqns[row])


def check_files(index: CheckpointIndex, listing: Mapping[str, FileInfo]) -> Iterator[Finding]:
    """Compare the files that are there with those that were committed."""
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        if name not in listing:
            yield Finding("missing-file", f"{name} is missing", name)
        elif size not in (UNKNOWN, listing[name].size_bytes):
            found = listing[name].size_bytes
            yield Finding("file-size", f"{name} has {found} bytes, committed were {size}", name)
    for name in sorted(listing.keys() - set(index.files) - {MANIFEST_NAME, METADATA_NAME, NOTES_NAME}):
        if name.startswith(TEMPORARY_PREFIX):
            yield Finding("stray-file", f"{name} is left over from an interrupted publish", name)
        elif not _RANK_LOCAL.fullmatch(name):
            yield Finding("stray-file", f"{name} does not belong to the checkpoint", name)
