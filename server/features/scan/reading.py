"""Reading candidates: their facts, for which little of a manifest is decoded.

Steps of one run have the same structure, so a structure is decoded once, and recognised by a digest of the
manifest's encoded columns after that.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dcp.server.catalog.facts import CheckpointFacts, FoundState
from dcp.server.catalog.source_facts import (
    content_digest_of,
    facts_of_parts,
    facts_of_source,
    facts_without_index,
    fingerprint_of,
    structure_of,
)
from dcp.server.catalog.structures import StructureFacts
from dcp.server.core.roots import StorageRoot
from dcp.server.features.scan.walk import Candidate, classify
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.native.manifest import (
    MAX_MANIFEST_BYTES,
    ManifestSummary,
    decode_manifest,
    summarize_manifest,
)
from dcp.storage.formats.opening import Source, SourcePlace, index_at
from dcp.storage.formats.torch.metadata_writer import torch_metadata_head
from dcp.storage.stores.base import FileInfo, Store
from dcp.storage.stores.posix.files import is_below, path_of_descriptor
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["Reader"]

_RACY_SECONDS: Final = 2.0
"""A file this young may change again without another time: it is read again the next time."""
_SKEW_SECONDS: Final = 60.0
_SETTLED_SECONDS: Final = 60.0
"""An unreadable file without a commit object that is younger than this is being written."""
_WHOLE_METADATA_BYTES: Final = 4 << 20
_MEMO_TENSORS: Final = 500_000


class _StructureMemo:
    """Structures by the encoded columns that they were decoded from; bounded, and safe from any thread."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, StructureFacts] = OrderedDict()
        self._tensors = 0
        self._guard = threading.Lock()

    def get(self, key: bytes, decode: Callable[[], StructureFacts]) -> StructureFacts:
        """Return the structure of ``key``, by ``decode`` if it is not known."""
        with self._guard:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found
        structure = decode()
        with self._guard:
            if key not in self._entries:
                self._entries[key] = structure
                self._tensors += len(structure.tensors)
            while self._tensors > _MEMO_TENSORS and len(self._entries) > 1:
                self._tensors -= len(self._entries.popitem(last=False)[1].tensors)
        return structure


class Reader:
    """A reader of candidates below ``root``; safe from any thread."""

    def __init__(self, root: StorageRoot, *, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._memo = _StructureMemo()
        self._clock = clock
        self._base = root.url_of("")

    def facts(self, candidate: Candidate) -> CheckpointFacts | None:
        """Return its facts; None if it is not there any more.

        Bytes that cannot be understood are a fact ("unreadable"). Raises OSError where the storage fails, and
        then nothing is known about the checkpoint.
        """
        observed_seconds = self._clock()
        try:
            if candidate.kind == "incomplete":
                # It may be committed by now, and registered by its trainer.
                found = classify(
                    candidate.key, {info.name: info for info in self._store(candidate.key).list()}
                )
                if not found:
                    return None
                candidate = found[0]
            fingerprint = self.fingerprint(candidate)
            if candidate.kind == "incomplete":
                return self._without_index(candidate, "incomplete", observed_seconds, fingerprint)
            return self._read(candidate, observed_seconds, fingerprint)
        except CheckpointNotFoundError:
            return None
        except (CheckpointError, OSError) as error:
            if isinstance(error, CheckpointConflictError):
                return None  # replaced again and again just now: the next scan sees it
            fingerprint = self.fingerprint(candidate)
            problem = self.root.problem(error).detail
            if isinstance(error, OSError):
                if not isinstance(error.__cause__ or error, PermissionError):
                    raise
                return self._without_index(candidate, "unreadable", observed_seconds, None, problem)
            if candidate.kind != "commit" and self._is_young(candidate.marks, _SETTLED_SECONDS):
                return self._without_index(candidate, "incomplete", observed_seconds, None)
            return self._without_index(candidate, "unreadable", observed_seconds, fingerprint, problem)

    def _without_index(
        self,
        candidate: Candidate,
        state: FoundState,
        observed_seconds: float,
        fingerprint: str | None,
        problem: str | None = None,
    ) -> CheckpointFacts:
        return facts_without_index(
            self.root.name,
            candidate.key,
            state,
            candidate.marks,
            observed_seconds=observed_seconds,
            fingerprint=fingerprint,
            problem=problem,
        )

    def fingerprint(self, candidate: Candidate) -> str | None:
        """Return its fingerprint, which changes with it; None while it is too young for that."""
        if self._is_young(candidate.marks, _RACY_SECONDS):
            return None
        return fingerprint_of(candidate.marks)

    def _is_young(self, marks: tuple[FileInfo, ...], seconds: float) -> bool:
        age = self._clock() - max((info.modified_seconds for info in marks), default=0.0)
        return -_SKEW_SECONDS < age < seconds

    def _read(
        self, candidate: Candidate, observed_seconds: float, fingerprint: str | None
    ) -> CheckpointFacts:
        key, marks = candidate.key, candidate.marks
        if candidate.kind == "commit":
            found = self._from_manifest(candidate, observed_seconds, fingerprint)
            if found is not None:
                return found
        if candidate.kind == "file":
            run, _, name = key.rpartition("/")
            place = SourcePlace(self._store(run), name)
        else:
            place = SourcePlace(self._store(key))
        source = Source(place.store, index_at(place), key, place.file)
        listing = None if candidate.kind == "commit" else marks
        return facts_of_source(
            self.root.name,
            key,
            source,
            listing,
            observed_seconds=observed_seconds,
            marks=marks,
            fingerprint=fingerprint,
        )

    def _from_manifest(
        self, candidate: Candidate, observed_seconds: float, fingerprint: str | None
    ) -> CheckpointFacts | None:
        """Return the facts, if the manifest is that of the files in this folder and has them all; else
        None."""
        key, sizes = candidate.key, {info.name: info.size_bytes for info in candidate.marks}
        if not 0 < sizes.get(MANIFEST_NAME, 0) <= MAX_MANIFEST_BYTES:
            return None
        # One byte more than was listed, so that a larger one that has replaced it does not look truncated.
        data = self._head(key, MANIFEST_NAME, sizes[MANIFEST_NAME] + 1, sizes[MANIFEST_NAME])
        if len(data) != sizes[MANIFEST_NAME]:
            return None
        summary = summarize_manifest(data)
        if summary.bytes is None:
            return None
        if METADATA_NAME in sizes and not self._belongs(key, summary, sizes[METADATA_NAME]):
            return None  # stock torch may have overwritten the folder: `formats.open` finds out
        return facts_of_parts(
            self.root.name,
            candidate.key,
            format=summary.format,
            provenance=summary.provenance,
            user=summary.user,
            structure=self._memo.get(summary.structure_key, lambda: structure_of(decode_manifest(data))),
            content_digest=content_digest_of(decode_manifest(data)) if summary.has_digests else None,
            fingerprint=fingerprint,
            bytes=summary.bytes,
            file_count=summary.file_count,
            modified_seconds=max(info.modified_seconds for info in candidate.marks),
            observed_seconds=observed_seconds,
        )

    def _belongs(self, key: str, summary: ManifestSummary, size_bytes: int) -> bool:
        """Return whether `.metadata` is the one published with the manifest, or the one that it replaced."""
        save_id = summary.provenance.get("save_id")
        if summary.torch_metadata_crc is not None and isinstance(save_id, str):
            # Its first bytes name its save, and all of it is many times as large as the manifest.
            head = torch_metadata_head(save_id, size_bytes)
            if self._head(key, METADATA_NAME, len(head), size_bytes) == head:
                return True
        if size_bytes > _WHOLE_METADATA_BYTES:
            return False
        metadata = self._head(key, METADATA_NAME, size_bytes, size_bytes)
        return crc32(metadata) in (summary.torch_metadata_crc, summary.replaced_torch_metadata_crc)

    def _head(self, key: str, name: str, count: int, size_bytes: int) -> bytes:
        """Read the first ``count`` bytes of a file that was listed with ``size_bytes``, or all if it has
        fewer.

        A local file is read without `Store`, which takes longer than the file.
        """
        if self.root.path is None:
            return self._remote_head(key, name, count, size_bytes)
        try:
            descriptor = os.open(f"{self._base}/{key}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return self._store(key).read(name, limit_bytes=MAX_MANIFEST_BYTES)  # for its errors
        try:
            place = path_of_descriptor(descriptor)  # a folder on the way may have become a link since
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and (not place or is_below(place, self._base)):
                return os.pread(descriptor, count, 0)
        finally:
            os.close(descriptor)
        return self._store(key).read(name, limit_bytes=MAX_MANIFEST_BYTES)

    def _remote_head(self, key: str, name: str, count: int, size_bytes: int) -> bytes:
        """Read the same by one request, since the size is known from the listing."""
        store = self._store(key)
        if name == MANIFEST_NAME:
            return store.read(name, limit_bytes=MAX_MANIFEST_BYTES)
        try:
            with store.open_read(name, expected_bytes=size_bytes) as handle:
                return handle.pread(min(count, size_bytes), 0)
        except CorruptCheckpointError:  # of another size by now: no expected head
            return b""

    def _store(self, key: str) -> Store:
        if self.root.path is not None:
            folder = f"{self._base}/{key}" if key else self._base
            return PosixStore(folder, links_within=self._base)
        return self.root.store(key)
