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
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.payload_checks import (
    Finding,
    PayloadChecks,
    StreamedSums,
    VerifyReport,
    kind_of,
)
from dcp.inspection.values.digests import (
    CheckpointDigests,
    digest_of_sum,
    digests,
    sums_of,
)
from dcp.inspection.values.tensor_reading import ReportBytes, TensorReader
from dcp.planners.load.selection import Patterns
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, NOTES_NAME
from dcp.storage.digests import digest_of_all
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
        with_digest = with_digest and sums.left_bytes <= _MOST_AGAIN * report.bytes + _SMALL_BYTES
        other = None if against is None else against()
        try:
            with TensorReader(store, index, verify="full", name=place.url) as reader:
                report.digest = _check_digests(reader, sums.sums, other, report, is_all=with_digest)
        except CorruptCheckpointError as error:  # also of tensors of which a part is nowhere
            report.findings.append(Finding(kind_of(error, "index"), str(error), fqn=error.fqn or None))
    is_same = True
    if report.findings:  # one that is gone or damaged was not replaced
        with suppress(CheckpointError):
            is_same = encode_manifest(index_at(place)) == encode_manifest(index)
        if not is_same:
            raise CheckpointConflictError(
                f"{place.url} was replaced while it was being verified; verify it again", path=place.url
            )
    report.findings.sort(key=lambda found: (found.file or "", found.offset or 0))
    return report


def _check_metadata(store: Store, index: CheckpointIndex, listing: dict[str, FileInfo]) -> Iterator[Finding]:
    if MANIFEST_NAME not in listing:
        return
    name, message = METADATA_NAME, None
    if index.format == TORCH_DCP.name:
        name = MANIFEST_NAME
        message = f"stock torch has saved over this checkpoint; {name} is of the save before and ignored"
    elif index.torch_metadata_crc is not None and name not in listing:
        message = f"{name} is missing: stock torch cannot load this"
    elif index.torch_metadata_crc is not None:
        crc = crc32(store.read(name, limit_bytes=MAX_TORCH_METADATA_BYTES))
        if crc != index.torch_metadata_crc:
            what = "differs from what was committed: it is damaged, and stock torch would trust it"
            if crc == index.replaced_torch_metadata_crc:
                what = "is still that of the save which this one replaced: stock torch would load that one"
            message = f"{name} {what}"
    if message is not None:
        yield Finding("metadata", message, name)


def _check_digests(
    reader: TensorReader,
    sums: Mapping[int, bytes],
    other: CheckpointDigests | None,
    report: VerifyReport,
    *,
    is_all: bool,
) -> str | None:
    """Report the tensors of ``reader`` that are not what its manifest's digests say, and those that are not
    the ones of ``other``; return the digest of all, where all were looked at and are right.

    Of those that ``sums`` lack the ones with a digest in the manifest are read, and all where there is an
    ``other`` or ``is_all``.
    """
    index = reader.index
    noted = {row: digest for row in range(index.tensor_count) if (digest := index.digest(row)) is not None}
    rows = [*noted] if other is None and not is_all else [*range(index.tensor_count)]
    read = sums_of(reader, [row for row in rows if row not in sums])
    own = {row: digest_of_sum(index, row, (sums if row in sums else read)[row]) for row in rows}
    wrong = {
        index.fqns[row]: f"has the digest {own[row]}, and the manifest says {digest}, which comparisons go by"
        for row, digest in noted.items()
        if own[row] != digest
    }
    found = [*wrong.items(), *(() if other is None else _differing(index, own, other))]
    report.findings += [Finding("digest", f"{fqn!r} {what}", fqn=fqn) for fqn, what in found]
    named = ((index.fqns[row], digest) for row, digest in own.items())
    return digest_of_all(named) if report.ok and len(own) == index.tensor_count else None


def _differing(
    index: CheckpointIndex, own: Mapping[int, str], other: CheckpointDigests
) -> Iterator[tuple[str, str]]:
    """Yield names of tensors that are not the same in both, and how they differ."""
    theirs = {tensor.fqn: tensor for tensor in other.tensors}
    for row, digest in own.items():
        fqn, same = index.fqns[row], theirs.pop(index.fqns[row], None)
        if same is None:
            yield fqn, f"is not in {other.url}"
        elif same.digest != digest:
            here, there = (
                f"{dtype} {'x'.join(map(str, shape)) or 'scalar'} {shown}"
                for dtype, shape, shown in (
                    (index.dtype(row).name, index.shape(row), digest),
                    (same.dtype, same.shape, same.digest),
                )
            )
            yield fqn, f"is another one in {other.url}: {here} here, there {there}"
    yield from ((fqn, f"is only in {other.url}") for fqn in theirs)


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
