"""Safetensors extras: contents other than tensors, as a string of the file's metadata.

Objects, nesting, ties and requires_grad as plain data under `EXTRAS_KEY`, ignored by other readers.
Torch-free.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError, PlanError, UnsupportedFormatError
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, Path
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.stores.base import Store

EXTRAS_KEY: Final = "dcphub"
MAX_EXTRAS_BYTES: Final = 64 << 20

EXTRAS_VERSION: Final = 1
OWN_KEYS: Final = frozenset({EXTRAS_KEY, "format"})
"""Metadata keys that do not belong to the user."""

_MAX_VALUE_BYTES: Final = 64 << 20
_COMPARED_BYTES: Final = 4 << 20


def encode_extras(extras: Mapping[str, Any]) -> str:
    """Return plain data as a string.

    Raises:
        PlanError: If the data is not plain or exceeds MAX_EXTRAS_BYTES.
    """
    data = encode_plain(dict(extras), limit_bytes=MAX_EXTRAS_BYTES)
    if data is None:
        raise PlanError(
            f"the objects and nesting of the checkpoint exceed {MAX_EXTRAS_BYTES >> 20} MiB, the limit for "
            "the metadata of a safetensors file: exclude large objects, or convert to another format"
        )
    return base64.b64encode(zlib.compress(data)).decode("ascii")


def decode_extras(text: str) -> dict[str, Any]:
    """Return the data of `encode_extras` in bounded memory; CheckpointFormatError for other text."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_EXTRAS_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise CheckpointFormatError(
            f"the safetensors metadata {EXTRAS_KEY!r} is malformed: {error}"
        ) from error
    if not stream.eof:
        raise CheckpointFormatError(
            f"the safetensors metadata {EXTRAS_KEY!r} is truncated, or larger than {MAX_EXTRAS_BYTES} bytes"
        )
    value = decode_plain(data, limit_bytes=MAX_EXTRAS_BYTES)
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"the safetensors metadata {EXTRAS_KEY!r} is not a dict")
    return value


def with_extras(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """Return ``index`` with the extras of a conversion, or unchanged.

    Names noted as tied are tied if their bytes are equal.

    Raises:
        CheckpointFormatError: For malformed extras.
    """
    texts = [index.user.get(EXTRAS_KEY)]
    by_file = index.provenance.get("file_metadata")
    if isinstance(by_file, dict):
        texts += [note.get(EXTRAS_KEY) for note in by_file.values() if isinstance(note, dict)]
    text = next((text for text in texts if isinstance(text, str)), None)
    user = {key: value for key, value in index.user.items() if key not in OWN_KEYS}
    if text is None:
        return replace(index, user=user) if len(user) < len(index.user) else index
    extras = decode_extras(text)
    if extras.get("version") != EXTRAS_VERSION:
        raise UnsupportedFormatError(
            f"{store.url}: the safetensors metadata {EXTRAS_KEY!r} does not have version {EXTRAS_VERSION}: "
            "it was written by a newer dcphub; upgrade dcphub"
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
        objects=ObjectColumns.of_plain(_encoded(_checked(extras, "values", dict))),
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
        raise CheckpointFormatError(
            f"{name} of the safetensors metadata {EXTRAS_KEY!r} is not a {kind.__name__}"
        )
    return value


def _path(fqn: str, paths: Mapping[str, Any]) -> Path:
    path = paths.get(fqn, (fqn,))
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        raise CheckpointFormatError(
            f"the path of {fqn!r} in the safetensors metadata {EXTRAS_KEY!r} is malformed"
        )
    return path


def _encoded(values: Mapping[Any, Any]) -> dict[str, bytes]:
    found = {}
    for fqn, value in values.items():
        data = encode_plain(value, limit_bytes=_MAX_VALUE_BYTES)
        if data is None or not isinstance(fqn, str):
            raise CheckpointFormatError(
                f"the value of {fqn!r:.200} in the safetensors metadata {EXTRAS_KEY!r} is malformed"
            )
        found[fqn] = data
    return found


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
