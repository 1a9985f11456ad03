"""Extras that a safetensors file has no place for, in one string of its metadata: written and taken back.

Values that are no tensors, nesting, ties, requires_grad and the user's metadata. Others pass over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dcp.conversion.contents.entries import Entries, Value
from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, ObjectColumns, Path
from dcp.storage.formats.plain import encode_plain
from dcp.storage.formats.safetensors import EXTRAS_KEY, decode_extras
from dcp.storage.stores.base import Store

__all__ = ["extras_of", "metadata_of", "with_extras"]

_VERSION: Final = 1
_MAX_VALUE_BYTES: Final = 64 << 20
_COMPARED_BYTES: Final = 4 << 20
_OWN_KEYS: Final = frozenset({EXTRAS_KEY, "format"})
"""Keys of a file's metadata that are not the user's."""


def extras_of(
    entries: Entries, values: Sequence[tuple[Value, Any]], structure: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the extras to keep besides tensors; empty for a flat dict of tensors."""
    contents = {value.fqn: content for value, content in values}
    order = list(entries.paths)
    if len(contents) < len(entries.values):
        written = {*contents, *entries.names}
        order = [fqn for fqn in order if fqn in written]
    grads = set(np.flatnonzero(entries.index.requires_grad).tolist())
    has_structure = bool(structure and (structure["containers"] or structure.get("values")))
    found: dict[str, Any] = {
        "paths": {fqn: path for fqn in order if len(path := entries.paths[fqn]) > 1 or path[0] != fqn},
        "values": contents,
        "ties": {
            entry.fqn: entries.names[entry.tied_to]
            for number, entry in enumerate(entries.tensors)
            if entry.tied_to != number
        },
        "structure": structure if has_structure else None,
        "requires_grad": [e.fqn for e in entries.tensors if e.tensor in grads],
        "user": {key: value for key, value in entries.index.user.items() if not _is_text(key, value)},
    }
    found = {name: value for name, value in found.items() if value}
    if not found:
        return {}
    return {"version": _VERSION, "order": order, **found}


def metadata_of(user: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file: strings of the user's stay readable to others."""
    return {"format": "pt", **{key: value for key, value in user.items() if _is_text(key, value)}}


def _is_text(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, str) and key not in _OWN_KEYS


def with_extras(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """Return ``index`` with what `extras_of` kept; itself where there is nothing.

    Raises CheckpointFormatError for extras that are malformed. Names noted as tied are tied if their bytes
    are still equal, which is looked at.
    """
    texts = [index.user.get(EXTRAS_KEY)]
    by_file = index.provenance.get("file_metadata")
    if isinstance(by_file, dict):
        texts += [note.get(EXTRAS_KEY) for note in by_file.values() if isinstance(note, dict)]
    text = next((text for text in texts if isinstance(text, str)), None)
    user = {key: value for key, value in index.user.items() if key not in _OWN_KEYS}
    if text is None:
        return replace(index, user=user) if len(user) < len(index.user) else index
    extras = decode_extras(text)
    if extras.get("version") != _VERSION:
        raise UnsupportedFormatError(
            f"{store.url}: the metadata {EXTRAS_KEY!r} is of another version than {_VERSION}: it was written "
            "by a newer dcphub; read it with one"
        )
    paths = _checked(extras, "paths", dict)
    known = {*index.fqns, *_checked(extras, "values", dict)}
    order = [fqn for fqn in _checked(extras, "order", list) if fqn in known]
    order += [fqn for fqn in known.difference(order) if isinstance(fqn, str)]
    grads = set(_checked(extras, "requires_grad", list))
    provenance = {name: value for name, value in index.provenance.items() if name != "file_metadata"}
    if "structure" in extras:
        provenance["structure"] = extras["structure"]
    index = replace(
        index,
        objects=_objects(_checked(extras, "values", dict)),
        planner_data={fqn: _path(fqn, paths) for fqn in order},
        requires_grad=np.array([fqn in grads for fqn in index.fqns], dtype=np.uint8),
        provenance=provenance,
        user=user | _checked(extras, "user", dict),
    )
    index.check()
    return _tied(store, index, _checked(extras, "ties", dict))


def _checked(extras: Mapping[str, Any], name: str, kind: type) -> Any:
    value = extras.get(name, kind())
    if not isinstance(value, kind):
        raise CheckpointFormatError(f"{name} of the metadata {EXTRAS_KEY!r} is no {kind.__name__}")
    return value


def _path(fqn: str, paths: Mapping[str, Any]) -> Path:
    path = paths.get(fqn, (fqn,))
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        raise CheckpointFormatError(f"the path of {fqn!r} in the metadata {EXTRAS_KEY!r} is malformed")
    return path


def _objects(values: Mapping[str, Any]) -> ObjectColumns:
    encoded: dict[bytes, int] = {}
    plain = []
    for fqn, value in values.items():
        data = encode_plain(value, limit_bytes=_MAX_VALUE_BYTES)
        if data is None or not isinstance(fqn, str):
            raise CheckpointFormatError(f"a value of the metadata {EXTRAS_KEY!r} is malformed")
        plain.append(encoded.setdefault(data, len(encoded)))
    count = len(plain)
    return ObjectColumns(
        fqns=list(values),
        files=np.full(count, UNKNOWN, np.int64),
        offsets=np.zeros(count, np.int64),
        lengths=np.zeros(count, np.int64),
        crcs=np.full(count, UNKNOWN, np.int64),
        plain=np.array(plain, np.int64),
        values=list(encoded),
    )


def _tied(store: Store, index: CheckpointIndex, ties: Mapping[str, str]) -> CheckpointIndex:
    columns = {
        name: getattr(index, name).copy()
        for name in ("chunk_files", "record_offsets", "record_lengths", "payload_offsets")
    }
    for second, first in ties.items():
        rows = [index.position.get(name) for name in (first, second)]
        if None in rows:
            continue
        one, other = (index.chunks(row) for row in rows if row is not None)
        alike = len(one) == len(other) == 1 and index.dtype(rows[0]) == index.dtype(rows[1])  # type: ignore[arg-type]
        if alike and index.box(one[0]) == index.box(other[0]) and _are_equal(store, index, one[0], other[0]):
            for column in columns.values():
                column[other[0]] = column[one[0]]
    return replace(index, **columns)


def _are_equal(store: Store, index: CheckpointIndex, one: int, other: int) -> bool:
    names = [index.files[int(index.chunk_files[chunk])] for chunk in (one, other)]
    begins = [int(index.payload_offsets[chunk]) for chunk in (one, other)]
    size = int(index.payload_lengths[one])
    with store.open_read(names[0]) as first, store.open_read(names[1]) as second:
        for at in range(0, size, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, size - at)
            if first.pread(count, begins[0] + at) != second.pread(count, begins[1] + at):
                return False
    return True
