"""Steps of a run: committed steps, their facts and their notes. Does not import torch.

A step is a folder below the root, named by a format. It counts if it has a commit and its deletion has not
begun. Steps are listed without opening files; manifests are read once, for facts.

A manifest never changes after its publication. Pins, results of verifications and tombstones are notes in a
small file beside the manifest (`docs/reference/format.md`). Notes are replaced by compare-and-swap, so
concurrent writers lose no changes.
"""

from __future__ import annotations

import logging
import operator
import os
import re
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, SupportsIndex, TypeVar, cast

from dcp.inspection.checkpoints import header_of, metrics_of, number_of
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, NOTES_NAME, is_commit_object
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import reading_version
from dcp.storage.formats.opening import open_index
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.formats.views import dropped_from
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import Store, Version, check_name
from dcp.storage.stores.opening import ParentFolder, SmallFiles, open_parent_folder
from dcp.storage.threads import WorkerThreads

logger = logging.getLogger(__name__)

PARTIAL: Final = "partial"
"""Key of the user metadata with the names of the entries of a partial checkpoint."""

Health = Literal["good", "pending", "damaged", "partial"]
"""Health of a committed step. "good": counts for retention; "pending": being verified or replaced; "damaged":
cannot be loaded as committed; "partial": saved before a deadline, without the whole state.
"""


@dataclass(frozen=True, slots=True)
class StepState:
    """Facts of a committed step, for retention and `dcp.watch`.

    Attributes:
        committed_seconds: Time of the commit, in seconds since the epoch.
        dropped: Patterns of dropped entries.
        save_id: Id of the save, or a digest of the commit object; "" if unreadable.
        durable: True if the save was synced.
        metrics: Numbers in the user metadata; empty for stock checkpoints.
        partial: Names of the entries of a partial checkpoint.
        is_verified: True if this commit was verified, with any result.
    """

    step: int
    committed_seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    health: Health = "good"
    pinned: bool = False
    dropped: frozenset[str] = frozenset()
    save_id: str = ""
    durable: bool = True
    partial: tuple[str, ...] = ()
    is_verified: bool = False


def partial_of(user: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries of a partial checkpoint from its user metadata; () for a whole one."""
    names = user.get(PARTIAL)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


OPTIMIZER: Final = ("optim*.state.*", "*.optim*.state.*", "optim*.param_groups*", "*.optim*.param_groups*")
"""Patterns of optimizer entries: everything below ``state`` and ``param_groups`` under a key that begins with
``optim``.
"""


def patterns_of_part(name: str) -> tuple[str, ...]:
    """Return the patterns of the part ``name``: "optimizer", or a shell pattern."""
    return OPTIMIZER if name == "optimizer" else (name,)


MAX_NOTES_BYTES: Final = 1 << 20

_KIND: Final = "dcphub.notes"
_VERSION: Final = (1, 0)
_CRC: Final = struct.Struct(">I")
_CRC_HEAD: Final = b"\xa5crc32\xce"
_CRC_PLACE: Final = 0xFFFFFFFF
"""Placeholder of five bytes for an encoded CRC."""
_ATTEMPTS: Final = 32
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a verification of the commit ``save_id``, with its ``time`` in seconds since the epoch.

    ``what`` is "sizes" or "full" if ``ok``, otherwise the problem.
    """

    save_id: str
    time: float
    ok: bool
    what: str


@dataclass(frozen=True, slots=True)
class Deleting:
    """Tombstone of the commit ``save_id``: its deletion began at ``time`` (seconds since the epoch).

    After the removal of the commit objects, data files of the saves ``owners`` may be deleted, and other data
    files not newer than ``newest`` (time of the commit by the store's clock). Files of later saves are
    excluded.
    """

    save_id: str
    time: float
    owners: list[str]
    newest: float


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes of one folder. ``others`` preserves entries of later versions.

    ``verified`` and ``deleting`` apply to their commit only. A pin applies to the folder.
    """

    pinned: bool = False
    verified: Verified | None = None
    deleting: Deleting | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def verified_of(self, save_id: str) -> Verified | None:
        """Return the verification of the commit ``save_id``; None without one."""
        return self.verified if self.verified is not None and self.verified.save_id == save_id else None


def encode_notes(notes: Notes) -> bytes:
    """Make the bytes of the file. Raises OptionError if they would be above `MAX_NOTES_BYTES`."""
    fields: dict[str, Any] = {
        "kind": _KIND,
        "version": list(_VERSION),
        "pinned": notes.pinned,
        "verified": None if notes.verified is None else asdict(notes.verified),
        "deleting": None if notes.deleting is None else asdict(notes.deleting),
        **notes.others,
        "crc32": _CRC_PLACE,
    }
    data = encode_plain(fields, limit_bytes=MAX_NOTES_BYTES)
    if data is None:
        raise OptionError(f"notes must be plain data of up to {MAX_NOTES_BYTES} bytes")
    body = data[: -_CRC.size]
    return body + _CRC.pack(crc32(body))


def _decoded(data: bytes) -> Notes:
    """Decode notes. Time and memory are bounded by the file's size."""
    body = data[: -_CRC.size]
    if not body.endswith(_CRC_HEAD) or _CRC.unpack(data[-_CRC.size :])[0] != crc32(body):
        raise CorruptCheckpointError("the notes do not match their checksum: they are truncated or damaged")
    fields = decode_plain(data, limit_bytes=MAX_NOTES_BYTES)
    if type(fields) is not dict or fields.pop("kind", None) != _KIND:
        raise CheckpointFormatError("not a notes file of dcphub")
    fields.pop("crc32", None)
    with reading_version(fields.pop("version", None), _VERSION, "the file of notes"):
        pinned = fields.pop("pinned", None)
        verified = _noted(Verified, fields.pop("verified", None))
        deleting = _noted(Deleting, fields.pop("deleting", None))
        if type(pinned) is not bool or not {str}.issuperset(map(type, deleting.owners if deleting else ())):
            raise CheckpointFormatError("pinned or owners of the notes have the wrong type")
        return Notes(pinned, verified, deleting, fields)


def _noted(kind: type[_Value], fields: Any) -> _Value | None:
    if fields is None:
        return None
    # annotations are text, because of the import from __future__
    for name, wanted in kind.__annotations__.items():
        wanted = wanted.partition("[")[0]
        if type(fields) is not dict or type(fields.get(name)).__name__ != wanted:
            raise CheckpointFormatError(f"{name} of the notes is missing, or not a {wanted}")
    return kind(*map(fields.get, kind.__annotations__))


def read_notes(store: Store) -> Notes:
    """Read the notes of a folder; empty notes without a file.

    Raises CorruptCheckpointError for damaged bytes, UnsupportedFormatError for notes of a newer version, and
    CheckpointFormatError for an invalid format, each with ``path``.
    """
    path = store.path_of(NOTES_NAME)
    try:
        return _decoded(store.read(NOTES_NAME, limit_bytes=MAX_NOTES_BYTES))
    except CheckpointNotFoundError:
        return Notes()
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        raise type(error)(f"{path}: {error}", **({"path": path} | error.facts)) from error


def update_notes(store: Store, change: Callable[[Notes], Notes]) -> Notes:
    """Replace the notes by ``change`` of the current notes, called again after a concurrent change; return
    the new notes.

    Damaged notes are replaced by notes with a pin, which may have been lost. Raises CheckpointConflictError
    after too many concurrent changes, and UnsupportedFormatError for notes of a newer version.
    """
    for _ in range(_ATTEMPTS):
        # Read the version first, so that a concurrent change fails the publish below.
        version = store.version(NOTES_NAME)
        try:
            old = read_notes(store)
        except (CheckpointFormatError, CorruptCheckpointError) as error:
            if isinstance(error, UnsupportedFormatError):
                raise
            logger.warning("%s; the checkpoint now counts as pinned: unpin it to allow its deletion", error)
            old = Notes(pinned=True)
        new = change(old)
        if new == old and version is not None:
            return new
        try:
            store.publish(NOTES_NAME, encode_notes(new), durable=True, expected=version)
        except CheckpointConflictError:
            continue
        return new
    raise CheckpointConflictError(
        f"{store.path_of(NOTES_NAME)} was changed concurrently {_ATTEMPTS} times; try again",
        path=store.path_of(NOTES_NAME),
    )


_PROBES: Final = (0, 7, 123_456_789)
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_END_OF_STEPS: Final = 10**18
"""First step that `_NUMBER` cannot parse and ranks cannot exchange."""
_LONGEST_ID: Final = 256

_RACY_SECONDS: Final = 2.0
"""Age below which a file may change without a new time; its content is not cached."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit of a folder: its ``index``, or the ``problem`` that prevents reading.

    ``versions`` are those of the commit objects, taken before reading.
    """

    save_id: str
    index: CheckpointIndex | None
    problem: CheckpointError | None
    versions: Mapping[str, Version]


def whole_step(step: SupportsIndex) -> int:
    """Return ``step`` as an int, also from NumPy integers. Raises OptionError for other values."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < _END_OF_STEPS:
        raise OptionError(f"step: must be a whole number from 0 to {_END_OF_STEPS - 1}, not {step!r}")
    return number


def read_commit(store: Store) -> Commit | None:
    """Return the commit in ``store``; None without one. Raises StorageError if reading fails."""
    names = sorted((info.name for info in store.list() if is_commit_object(info.name)), key=_truth_first)
    versions = {name: version for name in names if (version := store.version(name)) is not None}
    token = next(iter(versions.values())).token if versions else ""
    try:
        index = open_index(store)
    except CheckpointNotFoundError:
        return None
    except CheckpointError as error:
        if isinstance(error, OSError) or not versions:
            raise
        return Commit(token, None, error, versions)
    return Commit(_id_of(index) or token, index, None, versions)


def _id_of(index: CheckpointIndex) -> str | None:
    save_id = index.provenance.get("save_id")
    return save_id if type(save_id) is str and 0 < len(save_id) <= _LONGEST_ID else None


def _truth_first(name: str) -> tuple[int, int, str]:
    rank = _NUMBER.match(name, 2)
    return (MANIFEST_NAME, METADATA_NAME, name).index(name), int(rank[0]) if rank else 0, name


class StepFolders:
    """Step folders below a root. Thread-safe.

    ``name_format`` has the field ``{step}``, or is a function of the step, and must contain the step in
    decimal digits. Raises OptionError for an ambiguous format. ``open_store`` opens stores below a root given
    by name.
    """

    def __init__(
        self,
        root: ParentFolder | str | os.PathLike[str],
        name_format: str | Callable[[int], str] = "step-{step:08d}",
        *,
        open_store: OpenStore = open_store,
    ) -> None:
        self.root = (
            root if isinstance(root, ParentFolder) else open_parent_folder(root, open_store=open_store)
        )
        self._name_format = name_format
        self._known: dict[tuple[int, str], tuple[SmallFiles, Any]] = {}
        names = [self.name(step) for step in _PROBES]
        if [self.step_of(name) for name in names] != list(_PROBES):
            raise OptionError(
                f"name: {self._name_format!r} makes {names[1]!r} of step {_PROBES[1]}, from which the step "
                "cannot be read; use a format such as 'step-{step:08d}'"
            )

    # -- names -----------------------------------------------------------------------------------------------

    def name(self, step: int) -> str:
        """Return the folder name of ``step``. Raises OptionError for an invalid step or name."""
        step = whole_step(step)
        form = self._name_format
        try:
            return check_name(form.format(step=step) if isinstance(form, str) else form(step))
        except (CheckpointFormatError, KeyError, IndexError) as error:
            raise OptionError(f"name: {form!r} gives no folder name for step {step}: {error}") from error

    def step_of(self, name: str) -> int | None:
        """Return the step of a folder name; None if no step has this name."""
        for match in _NUMBER.finditer(name):
            step = int(match[0])
            if self.name(step) == name:
                return step
        return None

    def checkpoint_id(self, step: int) -> str:
        """Return the checkpoint id for `dcp.load`."""
        return self.root.store(self.name(step)).url

    def store(self, step: int) -> Store:
        """Return the store of the step's folder, without access to the storage."""
        return self.root.store(self.name(step))

    def check_run(self) -> None:
        """Raise OptionError if the root is a checkpoint instead of a run."""
        place = self.root.place
        if any(map(place.version, (MANIFEST_NAME, METADATA_NAME))) and not self.committed():
            raise OptionError(
                f"{place.url} is a checkpoint, not a run: pass the folder that contains its steps"
            )

    # -- listing ---------------------------------------------------------------------------------------------

    def folders(self) -> dict[int, SmallFiles]:
        """Return all step folders by step, ascending, with their commit objects and notes, also uncommitted
        ones.

        Needs one listing on object stores, and up to three more requests for each folder elsewhere.
        """
        found: dict[int, SmallFiles] = {}
        for name, files in self.root.look((NOTES_NAME,)).items():
            if (step := self.step_of(name)) is not None:
                found[step] = files
        return dict(sorted(found.items()))

    def committed(self) -> dict[int, SmallFiles]:
        """Return the committed steps, ascending, with their small files, without steps under deletion.

        Only new notes are opened.
        """
        folders = self.folders()
        return {step: folders[step] for step, counts in self._of_each(self._counts, folders) if counts}

    def newest_first(self, without: Collection[int] = ()) -> Iterator[int]:
        """Yield the steps of `committed`, descending; notes are read on access to each step."""
        for step, files in reversed(self.folders().items()):
            if step not in without and self._counts(step, files):
                yield step

    def has(self, step: int) -> bool:
        """Return whether ``step`` is committed, without listing other steps."""
        return self._counts(step, self.root.look_into(self.name(step), (NOTES_NAME,)))

    def has_whole(self, step: int) -> bool:
        """Return whether ``step`` is committed and not partial; damaged steps count."""
        try:
            return self.has(step) and not self.facts(step).partial
        except CheckpointNotFoundError:
            return False
        except CheckpointError:
            return True

    def half_deleted(self) -> list[int]:
        """List the steps with a tombstone."""
        noted = {step: files for step, files in self.folders().items() if NOTES_NAME in files}
        return [step for step, notes in self._of_each(self._notes_of, noted) if notes.deleting is not None]

    def pinned(self) -> list[int]:
        """List the pinned committed steps."""
        found = self._of_each(self._notes_of, self.committed())
        return [step for step, notes in found if notes.pinned]

    def _of_each(
        self, look: Callable[[int, SmallFiles], _Value], folders: Mapping[int, SmallFiles]
    ) -> list[tuple[int, _Value]]:
        """Return the result of ``look`` for each folder, concurrently on slow storages."""
        if self.root.at_once == 1 or len(folders) < 2:
            return [(step, look(step, files)) for step, files in folders.items()]
        with WorkerThreads(min(self.root.at_once, len(folders))) as pool:
            found = pool.map(look, folders.keys(), folders.values())
            return list(zip(folders, found, strict=True))

    def _counts(self, step: int, files: SmallFiles) -> bool:
        if not any(map(is_commit_object, files)):
            return False
        notes = self._notes_of(step, files)
        if notes.deleting is None:
            return True
        # Rare: compare the tombstone with the current commit.
        commit = read_commit(self.store(step))
        return commit is not None and notes.deleting.save_id != commit.save_id

    # -- one step --------------------------------------------------------------------------------------------

    def facts(self, step: int, files: SmallFiles | None = None) -> StepState:
        """Return the facts of ``step``, cached until the commit changes. ``files`` are its small files if
        already listed.

        Raises CheckpointNotFoundError without a commit, and errors of a damaged index.
        """
        files = self.root.look_into(self.name(step)) if files is None else files
        objects = {name: info for name, info in files.items() if is_commit_object(name)}
        return self._kept(self._read_facts, step, objects)

    def notes(self, step: int) -> Notes:
        """Return the notes of ``step``; empty without a file. Unreadable notes count as a pin."""
        info = self.store(step).stat(NOTES_NAME)
        return self._notes_of(step, {} if info is None else {NOTES_NAME: info})

    def update_notes(self, step: int, change: Callable[[Notes], Notes]) -> Notes:
        """Update as `dcp.steps.update_notes`."""
        self._known.pop((step, "_read_notes"), None)
        return update_notes(self.store(step), change)

    def survey(self, pending: Collection[int] = ()) -> list[StepState]:
        """Return the state of all committed steps, ascending, for retention.

        The state is "damaged" (unreadable index or failed verification), "pending" (in ``pending``),
        "partial" or "good".
        """

        def look(step: int, files: SmallFiles) -> StepState | None:
            return self._state(step, files, step in pending) if self._counts(step, files) else None

        return [state for _, state in self._of_each(look, self.folders()) if state is not None]

    def forget(self, step: int) -> None:
        """Clear cached facts of a step that was saved again or deleted."""
        self._known.pop((step, "_read_facts"), None)
        self._known.pop((step, "_read_notes"), None)

    def _state(self, step: int, files: SmallFiles, pending: bool) -> StepState | None:
        notes = self._notes_of(step, files)
        try:
            facts = self.facts(step, files)
        except CheckpointNotFoundError:  # deleted after the listing
            return None
        except CheckpointError as error:
            if isinstance(error, OSError):  # a failure of the storage says nothing about the checkpoint
                logger.warning("%s: %s", self.checkpoint_id(step), error)
                return StepState(step, health="pending", pinned=notes.pinned)
            return StepState(step, health="pending" if pending else "damaged", pinned=notes.pinned)
        verified = notes.verified_of(facts.save_id)
        health = "damaged" if verified is not None and not verified.ok else facts.health
        return replace(
            facts,
            health="pending" if pending else health,
            pinned=notes.pinned,
            is_verified=verified is not None,
        )

    def _read_facts(self, step: int, objects: SmallFiles) -> StepState:
        """Read the facts of the commit with ``objects``, without further requests if it has an id."""
        store = self.store(step)
        index = open_index(store)
        save_id = _id_of(index)
        if save_id is None:
            commit = read_commit(store)
            save_id = commit.save_id if commit is not None else ""
        partial = partial_of(index.user)
        return StepState(
            step,
            number_of(header_of(store, index, list(objects.values())).committed_seconds),
            metrics_of(index.user),
            "partial" if partial else "good",
            dropped=frozenset(glob for part in dropped_from(index.provenance) for glob in part.patterns),
            save_id=save_id,
            durable=index.provenance.get("durable") is not False,
            partial=partial,
        )

    def _notes_of(self, step: int, files: SmallFiles) -> Notes:
        if NOTES_NAME not in files:
            return Notes()
        return self._kept(self._read_notes, step, {NOTES_NAME: files[NOTES_NAME]})

    def _read_notes(self, step: int, _: SmallFiles) -> Notes:
        try:
            return read_notes(self.store(step))
        except CheckpointError as error:
            if isinstance(error, OSError):
                raise
            logger.warning("%s; the checkpoint counts as pinned and is kept", error)
            return Notes(pinned=True)

    def _kept(self, read: Callable[[int, SmallFiles], _Value], step: int, files: SmallFiles) -> _Value:
        """Return the result of ``read`` on the small ``files`` of a step, cached while sizes and times are
        unchanged.
        """
        there, known = self._known.get((step, read.__name__), (None, None))
        if there == files:
            return cast("_Value", known)
        began_seconds = time.time()
        value = read(step, files)
        if all(began_seconds - info.modified_seconds > _RACY_SECONDS for info in files.values()):
            self._known[step, read.__name__] = files, value
        return value
