"""Malformed files that torch never writes, and manifests with false content and a valid checksum."""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest

__all__ = ["CENTRAL", "END", "STORAGE", "archive", "directory_of", "rewrite_manifest", "tensor_pickle"]

END = struct.Struct("<4sHHHHIIH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")

STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
"""A pickled storage "0" of four floats."""


def archive(pickled: bytes, storages: Mapping[str, bytes] | None = None, **entries: bytes) -> bytes:
    """Return a zip in the layout of torch.save, with this `data.pkl`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        target.writestr("m/data.pkl", pickled)
        target.writestr("m/byteorder", b"little")
        for name, data in (storages or {"0": bytes(16)}).items():
            target.writestr(f"m/data/{name}", data)
        for name, data in entries.items():
            target.writestr(f"m/{name}", data)
        target.writestr("m/version", b"3\n")
    return buffer.getvalue()


def _number(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def tensor_pickle(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, storage: bytes = STORAGE
) -> bytes:
    """Return the opcodes of a dict with a tensor under "x"."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _number(offset) + _tuple(sizes) + _tuple(strides)
    )
    return b"\x80\x02}X\x01\x00\x00\x00x" + tensor + b"\x89ccollections\nOrderedDict\n)RtRs."


def directory_of(data: bytes) -> int:
    """Return the offset of the zip's directory."""
    return int(END.unpack(data[-END.size :])[6])


class _Unchecked(CheckpointIndex):
    def check(self) -> None:
        """Accept anything."""


def rewrite_manifest(folder: Path, change: Callable[[CheckpointIndex], CheckpointIndex]) -> None:
    """Write a changed manifest to a checkpoint, like an attacker's encoder."""
    path = folder / "manifest.msgpack"
    index = change(decode_manifest(path.read_bytes()))
    fields = {field.name: getattr(index, field.name) for field in dataclasses.fields(index)}
    path.write_bytes(encode_manifest(_Unchecked(**fields)))
