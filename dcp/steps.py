"""The steps of a run: which are committed, what each says of itself, what is noted on it.

A step is a folder below the root, named by a format. It counts if a save committed there and its deletion has
not begun. Which ones there are is known from listings alone; manifests are read for facts, and only once.

A manifest never changes once it is published; pins, what verification found, and that a deletion has begun
come later, and are notes in a small file beside it. `docs/reference/format.md` specifies the bytes. Changes
are compared and replaced, so that two processes that note something at once lose nothing. Torch-free.
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

from dcp.inspection.checkpoints import header_of
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
"""The name in the user metadata under which a partial checkpoint says which entries it has."""

Health = Literal["good", "pending", "damaged", "partial"]
"""Of a committed step: to be counted on; being verified or replaced; known not to load as committed; saved
before a deadline, and not the whole state."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Facts of a committed step, for retention and for who follows a run.

    ``committed_seconds`` counts from the epoch, ``dropped`` are the globs of what was dropped. ``save_id``
    identifies the commit: that of the save or, where the format has none, a digest of the commit object; ""
    of one that cannot be read. ``durable``: it was synced when it was committed. ``metrics`` are numbers of
    the user metadata, which stock checkpoints have not; ``partial`` is what it has if it is no whole state.
    ``is_verified``: a verification of this very commit is noted, whatever it has found.
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
    """Return the entries of a partial checkpoint, by its user metadata; () of one that is the whole state."""
    names = user.get(PARTIAL)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


OPTIMIZER: Final = ("optim*.state.*", "*.optim*.state.*", "optim*.param_groups*", "*.optim*.param_groups*")
"""Names of what an optimizer keeps, as trainers call it: what is below ``state`` and ``param_groups`` under a
key that begins with ``optim``. A weight that is called so has neither above it."""


def patterns_of_part(name: str) -> tuple[str, ...]:
    """Return globs on the names of its entries; ``name`` is "optimizer", or such a glob itself."""
    return OPTIMIZER if name == "optimizer" else (name,)


MAX_NOTES_BYTES: Final = 1 << 20

_KIND: Final = "dcphub.notes"
_VERSION: Final = (1, 0)
_CRC: Final = struct.Struct(">I")
_CRC_HEAD: Final = b"\xa5crc32\xce"
_CRC_PLACE: Final = 0xFFFFFFFF
"""Encoded as the five bytes that any CRC may take the place of."""
_ATTEMPTS: Final = 32
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a verification of the commit ``save_id``, at a ``time`` in seconds since the epoch.

    ``what`` says what was looked at if ``ok`` ("sizes", "full"), and what is wrong if not.
    """

    save_id: str
    time: float
    ok: bool
    what: str


@dataclass(frozen=True, slots=True)
class Deleting:
    """The tombstone of the commit ``save_id``: its deletion has begun at a ``time`` in seconds since the
    epoch.

    It says which files may go once the commit objects are gone: data files of the saves ``owners``, and any
    that can be data and is not newer than ``newest`` (seconds; when the commit object was published, by the
    store's clock). What a save writes that began since is neither.
    """

    save_id: str
    time: float
    owners: list[str]
    newest: float


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one folder. ``others`` are entries of later versions, which are kept as they are.

    ``verified`` and ``deleting`` name their commit and mean nothing for another one; a pin
    is the folder's, whatever is saved there.
    """

    pinned: bool = False
    verified: Verified | None = None
    deleting: Deleting | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def verified_of(self, save_id: str) -> Verified | None:
        """Return what was found about the commit ``save_id``; None if that was not verified."""
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
        raise OptionError(
            f"notes may have {MAX_NOTES_BYTES} bytes of plain data, and these are more or other"
        )
    body = data[: -_CRC.size]
    return body + _CRC.pack(crc32(body))


def _decoded(data: bytes) -> Notes:
    """Read the notes in the bytes of a file; time and memory are bounded by its size."""
    body = data[: -_CRC.size]
    if not body.endswith(_CRC_HEAD) or _CRC.unpack(data[-_CRC.size :])[0] != crc32(body):
        raise CorruptCheckpointError("the notes do not match their checksum: they are truncated or damaged")
    fields = decode_plain(data, limit_bytes=MAX_NOTES_BYTES)
    if type(fields) is not dict or fields.pop("kind", None) != _KIND:
        raise CheckpointFormatError("the file has no notes of dcphub")
    fields.pop("crc32", None)
    with reading_version(fields.pop("version", None), _VERSION, "the file of notes"):
        pinned = fields.pop("pinned", None)
        verified = _noted(Verified, fields.pop("verified", None))
        deleting = _noted(Deleting, fields.pop("deleting", None))
        if type(pinned) is not bool or not {str}.issuperset(map(type, deleting.owners if deleting else ())):
            raise CheckpointFormatError("pinned or owners of the notes are not of their types")
        return Notes(pinned, verified, deleting, fields)


def _noted(kind: type[_Value], fields: Any) -> _Value | None:
    if fields is None:
        return None
    for name, wanted in kind.__annotations__.items():  # as text, by the import from __future__
        wanted = wanted.partition("[")[0]
        if type(fields) is not dict or type(fields.get(name)).__name__ != wanted:
            raise CheckpointFormatError(f"{name} of the notes is missing, or no {wanted}")
    return kind(*map(fields.get, kind.__annotations__))


def read_notes(store: Store) -> Notes:
    """Read the notes of a folder; empty ones if there are none.

    Raises, with ``path``, `CorruptCheckpointError` for bytes other than those written,
    `UnsupportedFormatError` for what a newer dcphub wrote, as far as this one does not know it,
    `CheckpointFormatError` for what no writer produces.
    """
    path = store.path_of(NOTES_NAME)
    try:
        return _decoded(store.read(NOTES_NAME, limit_bytes=MAX_NOTES_BYTES))
    except CheckpointNotFoundError:
        return Notes()
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        raise type(error)(f"{path}: {error}", **({"path": path} | error.facts)) from error


def update_notes(store: Store, change: Callable[[Notes], Notes]) -> Notes:
    """Replace the notes by ``change`` of what they are; it is called again if another writer was faster.

    Damaged notes may have held a pin, so the change gets pinned ones in their place. Returns what is
    published. Raises `CheckpointConflictError` if others write all the time, and `UnsupportedFormatError`
    rather than replace notes of a newer dcphub.
    """
    for _ in range(_ATTEMPTS):
        # The version first: what is read after it is that content, or the publish below is refused.
        version = store.version(NOTES_NAME)
        try:
            old = read_notes(store)
        except (CheckpointFormatError, CorruptCheckpointError) as error:
            if isinstance(error, UnsupportedFormatError):
                raise
            logger.warning("%s; the checkpoint counts as pinned now: unpin it if it was not", error)
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
        f"{store.path_of(NOTES_NAME)} was replaced by others {_ATTEMPTS} times while it was being changed",
        path=store.path_of(NOTES_NAME),
    )


_PROBES: Final = (0, 7, 123_456_789)
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_END_OF_STEPS: Final = 10**18
"""The first step that `_NUMBER` cannot read back from a name, and the ranks cannot exchange."""
_LONGEST_ID: Final = 256

_RACY_SECONDS: Final = 2.0
"""A file this young may change again without its time showing it, so what was read of it is not kept."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of a folder: ``index``, or why it cannot be read (``problem``).

    ``versions`` are those of the commit objects, from before they were read.
    """

    save_id: str
    index: CheckpointIndex | None
    problem: CheckpointError | None
    versions: Mapping[str, Version]


def whole_step(step: SupportsIndex) -> int:
    """Return ``step`` as an int: numpy's whole numbers are taken too. Raises OptionError for what is no
    step."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < _END_OF_STEPS:
        raise OptionError(f"step: must be a whole number from 0 to {_END_OF_STEPS - 1}, not {step!r}")
    return number


def read_commit(store: Store) -> Commit | None:
    """Return what is committed in ``store``; None if nothing is. Raises `StorageError` where reading
    fails."""
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
    """The step folders below a root; safe to use from several threads.

    ``name_format`` has one field ``{step}``, or is a function of the step; it must write the step in decimal
    digits. Raises OptionError if it does not, or if names could not be distinguished. ``open_store`` makes
    the stores below a root that is given by its name.
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
        """Return the folder's name. Raises OptionError as `whole_step`, and for a name that is not a plain
        one."""
        step = whole_step(step)
        form = self._name_format
        try:
            return check_name(form.format(step=step) if isinstance(form, str) else form(step))
        except (CheckpointFormatError, KeyError, IndexError) as error:
            raise OptionError(f"name: {form!r} gives no folder name for step {step}: {error}") from error

    def step_of(self, name: str) -> int | None:
        """Return the step whose folder is called ``name``; None if no step's is."""
        for match in _NUMBER.finditer(name):
            step = int(match[0])
            if self.name(step) == name:
                return step
        return None

    def checkpoint_id(self, step: int) -> str:
        """Return what `dcp.load` takes."""
        return self.root.store(self.name(step)).url

    def store(self, step: int) -> Store:
        """Return the step's folder; nothing is touched."""
        return self.root.store(self.name(step))

    def check_run(self) -> None:
        """Raise OptionError for a checkpoint in the place of a run, in which no step would ever be."""
        place = self.root.place
        if any(map(place.version, (MANIFEST_NAME, METADATA_NAME))) and not self.committed():
            raise OptionError(
                f"{place.url} is a checkpoint, and no run: give the folder that its steps are in"
            )

    # -- which there are -------------------------------------------------------------------------------------

    def folders(self) -> dict[int, SmallFiles]:
        """Return all step folders by step, ascending, with the commit objects and notes that are in them.

        Uncommitted and half-deleted ones too. One listing, and no more on object stores; elsewhere a request
        or three for each folder.
        """
        found: dict[int, SmallFiles] = {}
        for name, files in self.root.look((NOTES_NAME,)).items():
            if (step := self.step_of(name)) is not None:
                found[step] = files
        return dict(sorted(found.items()))

    def committed(self) -> dict[int, SmallFiles]:
        """Return the steps with a committed checkpoint whose deletion has not begun, ascending, each with its
        small files; nothing is opened besides new notes."""
        folders = self.folders()
        return {step: folders[step] for step, counts in self._of_each(self._counts, folders) if counts}

    def newest_first(self, without: Collection[int] = ()) -> Iterator[int]:
        """Give the steps of `committed`, descending; notes are read when their step is asked for, and not
        before."""
        for step, files in reversed(self.folders().items()):
            if step not in without and self._counts(step, files):
                yield step

    def has(self, step: int) -> bool:
        """Return whether ``step`` is one of `committed`, without a look at the others."""
        return self._counts(step, self.root.look_into(self.name(step), (NOTES_NAME,)))

    def has_whole(self, step: int) -> bool:
        """Return whether ``step`` is one of `committed`, and not partial; a damaged one counts."""
        try:
            return self.has(step) and not self.facts(step).partial
        except CheckpointNotFoundError:
            return False
        except CheckpointError:
            return True

    def half_deleted(self) -> list[int]:
        """List the steps whose deletion has begun: notes have a tombstone, for whatever commit."""
        noted = {step: files for step, files in self.folders().items() if NOTES_NAME in files}
        return [step for step, notes in self._of_each(self._notes_of, noted) if notes.deleting is not None]

    def pinned(self) -> list[int]:
        """List the pinned ones of `committed`."""
        found = self._of_each(self._notes_of, self.committed())
        return [step for step, notes in found if notes.pinned]

    def _of_each(
        self, look: Callable[[int, SmallFiles], _Value], folders: Mapping[int, SmallFiles]
    ) -> list[tuple[int, _Value]]:
        """Return what ``look`` finds out about each folder, several at a time where requests take long."""
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
        # Rare: only now it matters which commit the tombstone is of.
        commit = read_commit(self.store(step))
        return commit is not None and notes.deleting.save_id != commit.save_id

    # -- about one -------------------------------------------------------------------------------------------

    def facts(self, step: int, files: SmallFiles | None = None) -> StepState:
        """Return what the checkpoint of ``step`` says of itself; read again only after the commit changed.
        ``files`` are its small files, where they were listed.

        Raises `CheckpointNotFoundError` if nothing is committed, and what is wrong with a damaged index.
        """
        files = self.root.look_into(self.name(step)) if files is None else files
        objects = {name: info for name, info in files.items() if is_commit_object(name)}
        return self._kept(self._read_facts, step, objects)

    def notes(self, step: int) -> Notes:
        """Return the step's notes; empty ones if there are none. Those that cannot be read count as a pin."""
        info = self.store(step).stat(NOTES_NAME)
        return self._notes_of(step, {} if info is None else {NOTES_NAME: info})

    def update_notes(self, step: int, change: Callable[[Notes], Notes]) -> Notes:
        """Update as `dcp.steps.update_notes`."""
        self._known.pop((step, "_read_notes"), None)
        return update_notes(self.store(step), change)

    def survey(self, pending: Collection[int] = ()) -> list[StepState]:
        """Return all steps with what retention goes by, ascending.

        A step is "damaged" if its index is, or a verification of this very commit said so; "pending" if it is
        among ``pending`` (being verified, or being saved again), "partial" if it is not the whole state; else
        "good", verified or not.
        """

        def look(step: int, files: SmallFiles) -> StepState | None:
            return self._state(step, files, step in pending) if self._counts(step, files) else None

        return [state for _, state in self._of_each(look, self.folders()) if state is not None]

    def forget(self, step: int) -> None:
        """Read everything about the step anew: it was saved again, or deleted."""
        self._known.pop((step, "_read_facts"), None)
        self._known.pop((step, "_read_notes"), None)

    def _state(self, step: int, files: SmallFiles, pending: bool) -> StepState | None:
        notes = self._notes_of(step, files)
        try:
            facts = self.facts(step, files)
        except CheckpointNotFoundError:  # deleted since it was listed
            return None
        except CheckpointError as error:
            if isinstance(error, OSError):  # the storage's fault: no verdict on the checkpoint
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
        """Read the facts of what is committed as ``objects``, by no request but those that read them, if it
        has an id."""
        store = self.store(step)
        index = open_index(store)
        save_id = _id_of(index)
        if save_id is None:
            commit = read_commit(store)
            save_id = commit.save_id if commit is not None else ""
        metrics, partial = index.user.get("metrics"), partial_of(index.user)
        numbers = {name: _number(value) for name, value in metrics.items()} if type(metrics) is dict else {}
        return StepState(
            step,
            _number(header_of(store, index, list(objects.values())).committed_seconds),
            {name: value for name, value in numbers.items() if type(name) is str and value is not None},
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
            logger.warning("%s; the checkpoint is kept as if it were pinned", error)
            return Notes(pinned=True)

    def _kept(self, read: Callable[[int, SmallFiles], _Value], step: int, files: SmallFiles) -> _Value:
        """Return what ``read`` finds in small ``files`` of a step; read once as long as their sizes and times
        stay what they are."""
        there, known = self._known.get((step, read.__name__), (None, None))
        if there == files:
            return cast("_Value", known)
        began_seconds = time.time()
        value = read(step, files)
        if all(began_seconds - info.modified_seconds > _RACY_SECONDS for info in files.values()):
            self._known[step, read.__name__] = files, value
        return value


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < 1 << 1023 else None
