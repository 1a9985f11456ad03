"""What a manager remembers about one checkpoint, in a small file beside its manifest.

The manifest never changes once it is published; pins, what verification found, and that a deletion has begun
come later, and are here. `docs/format.md` specifies the bytes. Changes are compared and replaced, so that two
processes that note something at once lose nothing. Torch-free.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.formats.versions import reading_version
from dcp.storage.stores.base import Store

__all__ = [
    "MAX_NOTES_BYTES",
    "Deleting",
    "Notes",
    "Verified",
    "decode_notes",
    "encode_notes",
    "read_notes",
    "update_notes",
]

logger = logging.getLogger(__name__)


MAX_NOTES_BYTES: Final = 1 << 20

_KIND: Final = "dcphub.notes"
_VERSION: Final = (1, 0)
_CRC: Final = struct.Struct(">I")
_CRC_HEAD: Final = b"\xa5crc32\xce"
_CRC_PLACE: Final = 0xFFFFFFFF
"""Encoded as the five bytes that any CRC may take the place of."""
_ATTEMPTS: Final = 32


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification of the commit ``save_id`` found, ``seconds`` after the epoch.

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

    ``verified`` and ``deleting`` name the commit that they are about and mean nothing for another one; a pin
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
    """The bytes of the file. Raises OptionError if they would be above `MAX_NOTES_BYTES`."""
    verified, deleting = notes.verified, notes.deleting
    fields: dict[str, Any] = {
        "kind": _KIND,
        "version": list(_VERSION),
        "pinned": notes.pinned,
        "verified": None
        if verified is None
        else {
            "save_id": verified.save_id,
            "time": float(verified.seconds),
            "ok": verified.ok,
            "what": verified.what,
        },
        "deleting": None
        if deleting is None
        else {
            "save_id": deleting.save_id,
            "time": float(deleting.seconds),
            "owners": list(deleting.owners),
            "newest": float(deleting.newest_seconds),
        },
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
    """The notes in the bytes of a file; time and memory are bounded by its size.

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
        return Notes(
            pinned=_take(fields, "pinned", bool),
            verified=_verified(fields.pop("verified", None)),
            deleting=_deleting(fields.pop("deleting", None)),
            others=fields,
        )


def _verified(fields: Any) -> Verified | None:
    if fields is None:
        return None
    return Verified(
        save_id=_take(fields, "save_id", str),
        seconds=_take(fields, "time", float),
        ok=_take(fields, "ok", bool),
        what=_take(fields, "what", str),
    )


def _deleting(fields: Any) -> Deleting | None:
    if fields is None:
        return None
    owners = _take(fields, "owners", list)
    if any(type(owner) is not str for owner in owners):
        raise CheckpointFormatError("owners of the notes are not strings")
    return Deleting(
        save_id=_take(fields, "save_id", str),
        seconds=_take(fields, "time", float),
        owners=tuple(owners),
        newest_seconds=_take(fields, "newest", float),
    )


def _take(fields: Any, name: str, kind: type) -> Any:
    if type(fields) is not dict or type(fields.get(name)) is not kind:
        raise CheckpointFormatError(f"{name} of the notes is missing, or not of the type {kind.__name__}")
    return fields.pop(name)


def read_notes(store: Store) -> Notes:
    """The notes of a folder; empty ones if there are none. Raises the errors of `decode_notes`, with
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
