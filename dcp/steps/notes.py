"""Notes of a manager on one checkpoint, in a small file beside its manifest; facts of a step, and parts of a
state, which may be dropped.

The manifest never changes once it is published; pins, what verification found, and that a deletion has begun
come later, and are here. `docs/format.md` specifies the bytes. Changes are compared and replaced, so that two
processes that note something at once lose nothing. Torch-free.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Final, Literal, TypeVar

from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.native.manifest import reading_version
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.stores.base import Store

__all__ = [
    "MAX_NOTES_BYTES",
    "OPTIMIZER",
    "PARTIAL",
    "Deleting",
    "Health",
    "Notes",
    "StepState",
    "Verified",
    "decode_notes",
    "encode_notes",
    "partial_of",
    "patterns_of_part",
    "read_notes",
    "update_notes",
]

logger = logging.getLogger(__name__)

PARTIAL: Final = "partial"
"""The name in the user metadata under which a partial checkpoint says which entries it has."""

Health = Literal["good", "pending", "damaged", "partial"]
"""Of a committed step: to be counted on; being verified or replaced; known not to load as committed; saved
before a deadline, and not the whole state."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Facts of a committed step for retention; ``committed_seconds`` counts from the epoch,
    ``dropped`` are the globs of what was dropped from it."""

    step: int
    committed_seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    health: Health = "good"
    pinned: bool = False
    dropped: frozenset[str] = frozenset()


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
_VERIFIED: Final = {"save_id": str, "time": float, "ok": bool, "what": str}
_DELETING: Final = {"save_id": str, "time": float, "owners": list, "newest": float}
"""Entries of the file, in the order of the fields of the classes below."""
_Noted = TypeVar("_Noted")


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a verification of the commit ``save_id``, ``seconds`` after the epoch.

    ``what`` says what was looked at if ``ok`` ("sizes", "full"), and what is wrong if not.
    """

    save_id: str
    seconds: float
    ok: bool
    what: str


@dataclass(frozen=True, slots=True)
class Deleting:
    """The tombstone of the commit ``save_id``: its deletion has begun ``seconds`` after the epoch.

    It says which files may go once the commit objects are gone: data files of the saves ``owners``, and any
    that can be data and is not newer than ``newest_seconds`` (when the commit object was published, by the
    store's clock). What a save writes that began since is neither.
    """

    save_id: str
    seconds: float
    owners: tuple[str, ...]
    newest_seconds: float


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

    def is_deleting(self, save_id: str) -> bool:
        """Return whether the deletion of the commit ``save_id`` has begun."""
        return self.deleting is not None and self.deleting.save_id == save_id


def encode_notes(notes: Notes) -> bytes:
    """Make the bytes of the file. Raises OptionError if they would be above `MAX_NOTES_BYTES`."""
    fields: dict[str, Any] = {
        "kind": _KIND,
        "version": list(_VERSION),
        "pinned": notes.pinned,
        "verified": _entries(notes.verified, _VERIFIED),
        "deleting": _entries(notes.deleting, _DELETING),
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


def decode_notes(data: bytes) -> Notes:
    """Read the notes in the bytes of a file; time and memory are bounded by its size.

    Raises `CorruptCheckpointError` for bytes other than those written, `UnsupportedFormatError` for what a
    newer dcphub wrote, as far as this one does not know it, `CheckpointFormatError` for what no writer
    produces.
    """
    body = data[: -_CRC.size]
    if len(data) > MAX_NOTES_BYTES:
        raise CheckpointFormatError(f"notes of {len(data)} bytes are above the limit of {MAX_NOTES_BYTES}")
    if not body.endswith(_CRC_HEAD) or _CRC.unpack(data[-_CRC.size :])[0] != crc32(body):
        raise CorruptCheckpointError("the notes do not match their checksum: they are truncated or damaged")
    fields = decode_plain(data, limit_bytes=MAX_NOTES_BYTES)
    if type(fields) is not dict or fields.pop("kind", None) != _KIND:
        raise CheckpointFormatError("the file has no notes of dcphub")
    fields.pop("crc32", None)
    with reading_version(fields.pop("version", None), _VERSION, "the file of notes"):
        deleting = _value(Deleting, _DELETING, fields.pop("deleting", None))
        if deleting is not None and any(type(owner) is not str for owner in deleting.owners):
            raise CheckpointFormatError("owners of the notes are not strings")
        pinned = _take(fields, "pinned", bool)
        verified = _value(Verified, _VERIFIED, fields.pop("verified", None))
        return Notes(pinned, verified, deleting, fields)


def _entries(value: Verified | Deleting | None, kinds: Mapping[str, type]) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: kind(part) for (name, kind), part in zip(kinds.items(), astuple(value), strict=True)}


def _value(cls: Callable[..., _Noted], kinds: Mapping[str, type], fields: Any) -> _Noted | None:
    if fields is None:
        return None
    parts = [_take(fields, name, kind) for name, kind in kinds.items()]
    return cls(*(tuple(part) if type(part) is list else part for part in parts))


def _take(fields: Any, name: str, kind: type) -> Any:
    if type(fields) is not dict or type(fields.get(name)) is not kind:
        raise CheckpointFormatError(f"{name} of the notes is missing, or not of the type {kind.__name__}")
    return fields.pop(name)


def read_notes(store: Store) -> Notes:
    """Read the notes of a folder; empty ones if there are none. Raises the errors of `decode_notes`, with
    ``path``."""
    path = store.path_of(NOTES_NAME)
    try:
        return decode_notes(store.read(NOTES_NAME, limit_bytes=MAX_NOTES_BYTES))
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
        old = _notes_or_pin(store)
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


def _notes_or_pin(store: Store) -> Notes:
    try:
        return read_notes(store)
    except UnsupportedFormatError:
        raise
    except (CheckpointFormatError, CorruptCheckpointError) as error:
        logger.warning("%s; the checkpoint counts as pinned now: unpin it if it was not", error)
        return Notes(pinned=True)
