"""Facts of candidates, read with little decoding of manifests; and registration by a trainer.

Steps of a run share a structure, so a structure is decoded once and then recognised by a digest of the
manifest's encoded columns.

A trainer names a checkpoint, and the service reads state, size, and structure from storage. Repeated or late
registrations therefore change nothing.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import unquote, urlsplit

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from sqlalchemy import Connection

from dcp.server.catalog.changes import mark_vanished, upsert_checkpoint
from dcp.server.catalog.facts import CheckpointFacts, FoundState
from dcp.server.catalog.inputs import Finite, Name, Request, Step, Text
from dcp.server.catalog.labels import MAX_LABELS
from dcp.server.catalog.source_facts import (
    content_digest_of,
    facts_of_parts,
    facts_of_source,
    facts_without_index,
    fingerprint_of,
    step_of_name,
    structure_of,
)
from dcp.server.catalog.structures import StructureFacts, prepare_structures
from dcp.server.core.allowances import Allowances, keeping, subjects_of
from dcp.server.core.problems import ConflictError, NotFoundError
from dcp.server.core.roots import Roots, StorageRoot, check_key
from dcp.server.core.security.principal import Principal
from dcp.server.database.engine import Database
from dcp.server.features.scan.walk import Candidate, classify
from dcp.server.records.checkpoints import Registered
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

_RACY_SECONDS: Final = 2.0
"""Younger files can change without a new time, so the next scan reads them again."""
_SKEW_SECONDS: Final = 60.0
_SETTLED_SECONDS: Final = 60.0
"""Younger unreadable files without a commit object count as being written."""
_WHOLE_METADATA_BYTES: Final = 4 << 20
_MEMO_TENSORS: Final = 500_000


class _StructureMemo:
    """Structures by their encoded columns; bounded and safe for threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, StructureFacts] = OrderedDict()
        self._tensors = 0
        self._guard = threading.Lock()

    def get(self, key: bytes, decode: Callable[[], StructureFacts]) -> StructureFacts:
        """Return the structure of ``key``; call ``decode`` for an unknown key."""
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
        """Return the facts of the candidate; None if the candidate is gone.

        Invalid bytes are a fact ("unreadable"). Raises OSError if the storage fails, with no facts about the
        checkpoint.
        """
        observed_seconds = self._clock()
        try:
            if candidate.kind == "incomplete":
                # its trainer may have committed and registered it in the meantime
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
                return None  # replaced several times during the read: the next scan reads the checkpoint
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
        """Return the fingerprint of the content; None for too young a candidate."""
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
        """Return the facts if the manifest belongs to the files of this folder; None otherwise."""
        key, sizes = candidate.key, {info.name: info.size_bytes for info in candidate.marks}
        if not 0 < sizes.get(MANIFEST_NAME, 0) <= MAX_MANIFEST_BYTES:
            return None
        # One extra byte, so that a larger replacement does not look truncated.
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
        """Return True if `.metadata` was published with the manifest, or before the manifest."""
        save_id = summary.provenance.get("save_id")
        if summary.torch_metadata_crc is not None and isinstance(save_id, str):
            # The first bytes name the save; the whole file is many times as large as the manifest.
            head = torch_metadata_head(save_id, size_bytes)
            if self._head(key, METADATA_NAME, len(head), size_bytes) == head:
                return True
        if size_bytes > _WHOLE_METADATA_BYTES:
            return False
        metadata = self._head(key, METADATA_NAME, size_bytes, size_bytes)
        return crc32(metadata) in (summary.torch_metadata_crc, summary.replaced_torch_metadata_crc)

    def _head(self, key: str, name: str, count: int, size_bytes: int) -> bytes:
        """Read the first ``count`` bytes of a file with the listed size ``size_bytes``, or the whole shorter
        file.

        Reads local files without `Store`, which takes longer than the file.
        """
        if self.root.path is None:
            return self._remote_head(key, name, count, size_bytes)
        try:
            descriptor = os.open(f"{self._base}/{key}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # for the errors raised by the store
            return self._store(key).read(name, limit_bytes=MAX_MANIFEST_BYTES)
        try:
            place = path_of_descriptor(descriptor)  # a folder in the path may have been replaced by a link
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and (not place or is_below(place, self._base)):
                return os.pread(descriptor, count, 0)
        finally:
            os.close(descriptor)
        return self._store(key).read(name, limit_bytes=MAX_MANIFEST_BYTES)

    def _remote_head(self, key: str, name: str, count: int, size_bytes: int) -> bytes:
        """Read the same bytes of a remote file by one request, with the size of the listing."""
        store = self._store(key)
        if name == MANIFEST_NAME:
            return store.read(name, limit_bytes=MAX_MANIFEST_BYTES)
        try:
            with store.open_read(name, expected_bytes=size_bytes) as handle:
                return handle.pread(min(count, size_bytes), 0)
        except CorruptCheckpointError:  # the size has changed: not the expected file
            return b""

    def _store(self, key: str) -> Store:
        if self.root.path is not None:
            folder = f"{self._base}/{key}" if key else self._base
            return PosixStore(folder, links_within=self._base)
        return self.root.store(key)


_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)


class Registration(Request):
    """Checkpoint saved or (``deleted``) deleted by a trainer.

    The service reads the commit state, size, and structure itself. ``root`` or ``root_url`` (URL of the
    parent folder) is required.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"root": "main", "key": "run/step-1", "tags": ["nightly"], "metrics": {"loss": 2.5}}]
        }
    )

    root: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = Field(
        default=None, description="Name of the root."
    )
    root_url: Annotated[Text, StringConstraints(min_length=1)] | None = Field(
        default=None, description="URL of the folder that contains the key, instead of `root`."
    )
    key: Annotated[str, StringConstraints(min_length=1, max_length=1024)] = Field(
        description="Path of the checkpoint in the root or below `root_url`."
    )
    step: Step | None = Field(default=None, description="Training step.")
    save_id: Annotated[Text, StringConstraints(min_length=1, max_length=64)] | None = Field(
        default=None, description="Unique id of the save, to detect a replaced checkpoint."
    )
    tags: Annotated[list[Name], Field(max_length=MAX_LABELS)] = Field(
        default_factory=list, description="Tags to add."
    )
    metrics: Annotated[dict[Name, Finite], Field(max_length=MAX_LABELS)] = Field(
        default_factory=dict, description="Metrics by name, to set."
    )
    deleted: bool = Field(default=False, description="True: the trainer has deleted the checkpoint.")

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if (self.root is None) == (self.root_url is None):
            raise ValueError("root or root_url is required")
        return self


def observe(
    database: Database,
    roots: Roots,
    registration: Registration,
    *,
    caller: Principal,
    allowances: Allowances,
    clock: Callable[[], float] = time.time,
) -> Callable[[Connection], Registered]:
    """Read the checkpoint. Returns a function that writes the facts to the catalog in a transaction. A large
    structure is written before, in many short transactions. The function raises ConflictError above the limit
    of bytes of the account of ``caller`` or of the root.

    Raises NotFoundError for an unknown or invisible root, and for missing files; ConflictError without a
    commit (the trainer can retry); UnprocessableError for an invalid key; UnavailableError if the storage
    does not answer; and errors of the catalog.
    """
    visible = caller.roots
    if registration.root_url is None:
        root, key = _in_root(roots, registration.root or "", visible), check_key(registration.key)
    else:
        root, key = _at_url(roots, registration.root_url, registration.key, visible)
    observed = clock()  # before reading: a new checkpoint must not count as gone
    facts = _facts(root, key, clock)
    if registration.deleted and facts is None:

        def forget(connection: Connection) -> Registered:
            mark_vanished(connection, root.name, [key], observed_seconds=observed)
            return Registered(None, root.name, key, is_new=False, is_present=False)

        return forget
    if facts is None:
        raise NotFoundError(f"the storage of root {root.name} has no checkpoint under this key")
    if facts.state == "incomplete" and not registration.deleted:
        raise ConflictError(f"root {root.name} has only an uncommitted save under this key")
    if facts.state == "committed" and not registration.deleted:
        facts = replace(_labelled(facts, registration), registered_by=caller.name, owner=caller.owner)
    prepare_structures(database, [facts.structure], clock=clock)
    return partial(_write, facts=facts, caller=caller, allowances=allowances)


def _write(
    connection: Connection, facts: CheckpointFacts, caller: Principal, allowances: Allowances
) -> Registered:
    with keeping(connection, allowances, subjects_of(caller.owner, caller.key_id, facts.root)) as warnings:
        row = upsert_checkpoint(connection, facts, actor=caller.name)
    is_present = facts.state == "committed"
    return Registered(row.id, facts.root, facts.key, row.is_new, is_present, facts.save_id, tuple(warnings))


def _labelled(facts: CheckpointFacts, registration: Registration) -> CheckpointFacts:
    step = facts.step
    if registration.step is not None and step in (None, step_of_name(facts.key)):
        step = registration.step
    return replace(
        facts, step=step, tags=frozenset(registration.tags), metrics={**facts.metrics, **registration.metrics}
    )


def _facts(root: StorageRoot, key: str, clock: Callable[[], float]) -> CheckpointFacts | None:
    """Read the facts of a checkpoint; None without files. Raises a ProblemError."""
    try:
        candidate = _candidate(root, key)
        return None if candidate is None else Reader(root, clock=clock).facts(candidate)
    except (CheckpointError, OSError) as error:
        raise root.problem(error) from error


def _candidate(root: StorageRoot, key: str) -> Candidate | None:
    place = root.place(key)
    if place.file is not None:
        info = place.store.stat(place.file)
        return None if info is None else Candidate(key, "file", (info,))
    found = classify(key, {info.name: info for info in place.store.list()})
    return next((candidate for candidate in found if candidate.key == key), None)


def place_of(roots: Roots, url: str, visible: frozenset[str] | None = None) -> tuple[str, str]:
    """Find the root and key for the path or URL ``url``. Raises NotFoundError, UnprocessableError."""
    folder, _, name = url.rstrip("/").rpartition("/")
    root, key = _at_url(roots, folder, name, visible)
    return root.name, key


def _in_root(roots: Roots, name: str, visible: frozenset[str] | None) -> StorageRoot:
    if visible is not None and name not in visible:
        raise NotFoundError(f"root {name[:64]!r} not found")
    return roots.get(name)


def _at_url(roots: Roots, url: str, key: str, visible: frozenset[str] | None) -> tuple[StorageRoot, str]:
    """Find the innermost root that contains the folder ``url``, and the key in the root."""
    place = _normal(url)
    found = [
        (inner, root)
        for root in roots
        if visible is None or root.name in visible
        for inner in (_below(place, own) for own in _places_of(root))
        if inner is not None
    ]
    if not found:
        raise NotFoundError("no root contains this URL; ask the operator to configure a root")
    inner, root = min(found, key=lambda one: len(one[0]))
    return root, check_key(f"{inner}/{key}" if inner else key)


def _places_of(root: StorageRoot) -> set[str]:
    if root.path is None:
        return {_normal(root.url)}
    return {str(root.path), os.path.realpath(root.path)}


def _normal(url: str) -> str:
    """Return a URL in comparable form: absolute paths without links, ``s3a`` as ``s3``."""
    match = _URL.fullmatch(url)
    if match is None:
        return os.path.realpath(url) if Path(url).is_absolute() else ""
    scheme = match[1].lower()
    if scheme == "file":
        try:
            return os.path.realpath(unquote(urlsplit(url).path))
        except ValueError:  # for example file://[
            return ""
    return f"{'s3' if scheme == 's3a' else scheme}://{match[2].rstrip('/')}"


def _below(place: str, root: str) -> str | None:
    """Return the part of ``place`` below ``root``, "" for the root, None outside of the root."""
    root = root.rstrip("/")
    if place == root:
        return ""
    return place[len(root) + 1 :] if place.startswith(f"{root}/") else None
