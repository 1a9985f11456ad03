"""Container notes: facts of a nested state dict beyond names and paths of its entries.

A path has the string of each key, and an empty container has no path. A note is plain data, ``{"path":
[...], "kind": "dict", ...}``, with one of

    "int_keys": True   all keys are ints, in the order of the entries' paths
    "keys": [...]      all keys in order, for dicts with other keys or empty values

Notes are part of ``provenance["structure"]``: see `dcp.storage.formats.torch.structure`. Torch-free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.index import Path
from dcp.storage.formats.plain import decode_plain, encode_plain

ContainerNote = Mapping[str, Any]
"""Note of a container."""

STRUCTURE_VERSION: Final = 1
"""Version of ``provenance["structure"]``."""

_MAX_NOTES_BYTES: Final = 32 << 20
_MAX_ENCODED_BYTES: Final = 1 << 30
_MAX_INT_BITS: Final = 4096
_KEY_TYPES: Final = frozenset((type(None), bool, int, float, str, bytes))

NO_PLAIN_KEY: Final = object()

logger = logging.getLogger(__name__)


class _Position(int):
    """Number in a path at the place of another part's dict."""


Noted = tuple[Sequence[ContainerNote], Mapping[str, Path]]
"""Notes of a part with the paths they describe."""


def plain_key(key: Any) -> Any:
    """Return ``key`` as an equal value of a plain type with the same string, or NO_PLAIN_KEY."""
    if _is_plain(key):
        return key
    if isinstance(key, np.generic):
        value = key.item()
    elif isinstance(key, str):
        value = str.__str__(key)
    elif isinstance(key, int):
        value = int(key)
    else:
        return NO_PLAIN_KEY
    return value if _is_plain(value) and value == key and str(value) == str(key) else NO_PLAIN_KEY


def _is_plain(key: Any) -> bool:
    if type(key) is int and key.bit_length() > _MAX_INT_BITS:
        return False  # too many digits for str()
    return type(key) in _KEY_TYPES or (type(key) is tuple and all(map(_is_plain, key)))


def note_of(path: Path, keys: Iterable[Any], *, all_have_entries: bool) -> dict[str, Any]:
    """Return the note of a dict with plain ``keys``."""
    keys = list(keys)
    note: dict[str, Any] = {"path": list(path), "kind": "dict"}
    if keys and all_have_entries and {int}.issuperset(map(type, keys)):
        note["int_keys"] = True
    elif keys:
        note["keys"] = keys
    return note


def notes_above(notes: Iterable[Any], paths: Iterable[Path]) -> list[ContainerNote]:
    """Return the notes of containers with an entry of ``paths`` below; invalid notes are skipped."""
    parents = {path[:depth] for path in paths for depth in range(len(path))}
    own = [note for note in notes if isinstance(note, dict) and isinstance(note.get("path"), list)]
    return [
        note
        for note in own
        if all(type(part) in (str, int) for part in note["path"]) and tuple(note["path"]) in parents
    ]


def structure_of_notes(notes: Sequence[ContainerNote]) -> dict[str, Any]:
    """Return ``{"structure": ...}`` for the provenance; empty without notes.

    Notes above the limit of a manifest are omitted with a warning.
    """
    if not notes:
        return {}
    structure = {"version": STRUCTURE_VERSION, "containers": [dict(note) for note in notes], "values": {}}
    if encode_plain(structure, limit_bytes=_MAX_NOTES_BYTES) is None:
        logger.warning(
            "the state dict has too many keys that are not strings, so their types are not stored. Loading "
            "into a state dict with these keys restores the types; other loads return the keys as strings"
        )
        return {}
    return {"structure": structure}


def notes_by_path(structure: Any) -> dict[Path, dict[str, Any]]:
    """Return the notes of ``provenance["structure"]`` (or None) by path.

    Raises:
        CheckpointFormatError: For malformed notes of an untrusted manifest.
    """
    containers = structure.get("containers") if isinstance(structure, dict) else []
    notes: dict[Path, dict[str, Any]] = {}
    for note in containers if isinstance(containers, list) else [None]:
        path = note.get("path") if isinstance(note, dict) else None
        if (
            note is None
            or not isinstance(path, list)
            or not all(type(part) in (str, int) for part in path)
            or not isinstance(note.get("keys", []), list)
            or not all(map(_is_plain, note.get("keys", ())))
            or not isinstance(note.get("metadata", {}), dict)
        ):
            raise CheckpointFormatError("the stored structure of the state is malformed")
        notes[tuple(path)] = note
    return notes


def original_keys(note: ContainerNote, names: Iterable[str | int]) -> dict[str | int, Any]:
    """Return the keys behind the path parts ``names`` below a noted container, in the noted order.

    Names without a note come last, unchanged.
    """
    if note.get("int_keys") is True:
        return {name: _as_int(name) for name in names}
    if "keys" not in note:
        return {name: name for name in names}
    left = dict.fromkeys(names)
    listed = {str(key): key for key in note["keys"]}
    keys = {name: key for name, key in listed.items() if name in left}
    return keys | {name: name for name in left if name not in keys}


def empty_dicts(notes: Mapping[Path, ContainerNote], paths: Iterable[Path]) -> list[Path]:
    """Return the paths of dicts noted as empty, except those with an entry of ``paths`` below."""
    parents = {path[:depth] for path in paths for depth in range(len(path))}
    return [
        path
        for path, note in notes.items()
        if path
        and path not in parents
        and note.get("kind", "dict") not in ("list", "tuple", "deque")
        and not (note.get("keys") or note.get("int_keys"))
    ]


def with_original_keys(nested: Any, notes: Mapping[Path, ContainerNote], path: Path = ()) -> Any:
    """Return ``nested``, the value at ``path``, with the noted keys of dicts."""
    if isinstance(nested, list):
        return [with_original_keys(item, notes, (*path, place)) for place, item in enumerate(nested)]
    if type(nested) is not dict:
        return nested
    keys = original_keys(notes.get(path, {}), nested)
    return {key: with_original_keys(nested[name], notes, (*path, name)) for name, key in keys.items()}


def _as_int(name: str | int) -> str | int:
    try:
        number = int(name)
    except ValueError:  # another name, or more digits than Python reads
        return name
    return number if str(number) == name else name


def join_notes(parts: Sequence[Noted]) -> tuple[Sequence[ContainerNote], list[str]]:
    """Return (all notes, differences as text); at a difference, the note of the first part is used.

    Parts differ if a name has keys of two types.
    """
    distinct = list({(id(notes), id(paths)): (notes, paths) for notes, paths in parts}.values())
    first = distinct[0][0] if distinct else ()
    # compare bytes, because True == 1 with different strings
    if all(notes is first or encode_notes(notes) == encode_notes(first) for notes, _ in distinct):
        return first, []
    joined: dict[Path, dict[str, Any]] = {tuple(note["path"]): {} for notes, _ in distinct for note in notes}
    is_full = dict.fromkeys(joined, True)
    problems: list[str] = []
    for own, paths in distinct:
        names: dict[Path, dict[str | int, None]] = {}  # path parts below each noted container
        for place in paths.values():
            for depth in range(len(place)):
                if place[:depth] in joined:
                    names.setdefault(place[:depth], {})[place[depth]] = None
        notes = {tuple(note["path"]): note for note in own}
        for path, keys in joined.items():
            note, below = notes.get(path), names.get(path, {})
            if note is None:
                found = {str(name): _Position(name) if type(name) is int else name for name in below}
            else:
                is_full[path] &= "keys" not in note
                listed = [str(key) for key in note.get("keys", ())]
                found = {str(name): key for name, key in original_keys(note, listed or below).items()}
            problems += _join_keys(path, keys, found)
    whole = [
        note_of(path, keys.values(), all_have_entries=is_full[path])
        for path, keys in joined.items()
        if _Position not in set(map(type, keys.values()))
    ]
    return whole, problems


def _join_keys(path: Path, keys: dict[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Add the keys ``found`` in a part to the ``keys`` of a container, and yield differences."""
    for name, key in found.items():
        known = keys.setdefault(name, key)
        if type(known) is not type(key):
            where = f"below {'.'.join(map(str, path))!r}" if path else "at the top"
            yield (
                f"the key {name!r} {where} is of type {type(known).__name__.lstrip('_')} on one rank and "
                f"{type(key).__name__.lstrip('_')} on another: use the same key types on all ranks"
            )


def encode_notes(notes: Sequence[ContainerNote]) -> bytes:
    """Encode notes for `decode_notes`; equal notes give equal bytes."""
    return encode_plain(list(notes), limit_bytes=_MAX_ENCODED_BYTES) or b""


def decode_notes(data: bytes) -> list[ContainerNote]:
    """Return the notes of `encode_notes`.

    Raises:
        CheckpointFormatError: For other bytes.
    """
    notes = decode_plain(data, limit_bytes=_MAX_ENCODED_BYTES)
    return list(notes_by_path({"containers": notes}).values())
