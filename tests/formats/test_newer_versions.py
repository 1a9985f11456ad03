"""Files of newer versions: an error that differs from damage, in each format that may be extended."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import dcp
from dcp.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from tests.support.formats_indexes import GOLDEN, decode_torch_metadata
from tests.support.programs import run_program


def newer(match: str) -> Any:
    """Expect the error of a newer version, which is never the error of damage."""
    return pytest.raises(UnsupportedFormatError, match=match)


# -- torch ---------------------------------------------------------------------------------------------------


def test_metadata_of_torch_2_15() -> None:
    """A committed `.metadata` of torch 2.15, with strides as sixth tensor property, can be read."""
    index = decode_torch_metadata((GOLDEN / "torch-2.15.metadata").read_bytes())
    assert [index.shape(row) for row in range(2)] == [(3, 2), (2,)]
    assert [index.dtype(row).name for row in range(2)] == ["float32", "bfloat16"]
    assert list(index.objects.fqns) == ["step"]


def metadata(**changes: Any) -> Metadata:
    """Return metadata of a checkpoint without entries."""
    made = Metadata({}, storage_data={}, storage_meta=StorageMeta(save_id="1"), version="1.0.0")
    made.__dict__.update(changes)
    return made


def with_tensor(**chunk_changes: Any) -> Metadata:
    """Return metadata of a checkpoint with one tensor."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    chunk.__dict__.update(chunk_changes)
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [chunk])
    return metadata(state_dict_metadata={"w": entry})


def test_unknown_fields_of_torch() -> None:
    """An unknown field of a later torch is refused if it has a value, and ignored if empty."""
    for changed in (metadata(compression="zstd"), with_tensor(strides=(1,)), metadata(version="2.0.0")):
        with newer("newer torch"):
            decode_torch_metadata(pickle.dumps(changed))
    for known in (metadata(compression=None), metadata(version="1.4.0"), metadata(version=None)):
        assert decode_torch_metadata(pickle.dumps(known)).tensor_count == 0
    meta = StorageMeta(save_id="2")
    meta.__dict__["host"] = "h"
    assert decode_torch_metadata(pickle.dumps(metadata(storage_meta=meta))).provenance["save_id"] == "2"


def rezipped(blob: bytes, version: bytes) -> bytes:
    """Return a torch.save file with another version number."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, version if name.endswith("/version") else old.read(name))
    return target.getvalue()


def test_zips_of_a_later_torch(tmp_path: Path) -> None:
    """A torch.save file of a later version than torch reads today is refused."""
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    blob = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(rezipped(blob, b"10\n"))
    assert dcp.read(tmp_path / "m.pt")["w"].tolist() == [1] * 3
    (tmp_path / "m.pt").write_bytes(rezipped(blob, b"11\n"))
    with newer("version 11.*newer torch"):
        dcp.open_index(tmp_path / "m.pt")


# -- dcphub --------------------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[dict[str, Any]], object], version: list[int]) -> Path:
    """Save a checkpoint, and change fields and version of the manifest with a valid checksum."""
    dcp.save({"w": torch.ones(2), "n": {"a": 1}}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").unlink()
    fields = msgpack.unpackb((folder / "manifest.msgpack").read_bytes())
    del fields["crc32"]
    fields["version"] = version
    change(fields)
    body = msgpack.packb(fields)
    body = bytes([body[0] + 1]) + body[1:] + b"\xa5crc32\xce"  # a map of fewer than 16 keys, plus one key
    (folder / "manifest.msgpack").write_bytes(body + struct.pack(">I", zlib.crc32(body)))
    return folder


UNKNOWN_HERE: list[Callable[[dict[str, Any]], object]] = [
    lambda fields: fields["chunks"].update(files=[1, None, 0, 1, 9, b"a"]),
    lambda fields: fields["tensors"].update(dtypes=[1, None, 250, 0, 0, b""]),
    lambda fields: fields["chunks"].pop("crcs"),
]


@pytest.mark.parametrize("change", UNKNOWN_HERE)
def test_a_later_minor_version_that_cannot_be_read(tmp_path: Path, change: Any) -> None:
    """Unknown packings and dtypes need a newer dcphub if the minor version is later; else they are errors."""
    with newer(r"version 1\.1.*newer dcphub"):
        dcp.open_index(changed(tmp_path / "newer", change, [1, 1]))
    with pytest.raises(CheckpointFormatError) as refused:
        dcp.open_index(changed(tmp_path / "now", change, [1, 0]))
    assert not isinstance(refused.value, UnsupportedFormatError)
    manifest = tmp_path / "newer" / "manifest.msgpack"
    flipped = bytearray(manifest.read_bytes())
    flipped[40] ^= 1
    manifest.write_bytes(flipped)
    with pytest.raises(CorruptCheckpointError):
        dcp.open_index(tmp_path / "newer")


def test_additions_of_a_later_minor_version_are_ignored(tmp_path: Path) -> None:
    """Unknown additions are ignored. Paths that cannot be decoded raise an error only when used."""
    more = changed(tmp_path / "more", lambda fields: fields.update(novelty={"x": [1]}), [1, 7])
    assert dcp.read(more)["n"] == {"a": 1}
    paths = changed(tmp_path / "paths", lambda fields: fields["planner_data"].pop("keys"), [1, 1])
    index = dcp.open_index(paths)
    with newer("newer dcphub"):
        _ = index.planner_data


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    """Loads and `verify` refuse a newer major version with an error that differs from damage."""
    place = changed(tmp_path, lambda fields: None, [2, 0])
    with newer(r"version 2\.0.*newer dcphub"):
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=place, no_dist=True)
    done = run_program("-m", "dcp", "verify", str(place), "--json", timeout_seconds=120)
    assert '"unsupported"' in done.stdout and done.returncode != 0
