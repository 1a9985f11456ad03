"""What a newer version wrote is told from damage: an error that says so, in every format that may grow."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import struct
import zipfile
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
from dcp.inspection.verification import verify
from dcp.planners.wire.codec import VERSION, decode_save_columns, encode_save_columns
from dcp.ranks.failures import is_damage
from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.native.object_blob import ObjectBlob
from dcp.storage.formats.native.record_reader import locate_payload
from dcp.storage.formats.safetensors.file import parse_header
from dcp.storage.formats.torch.metadata.reader import decode_torch_metadata
from dcp.storage.formats.torch.tensor_pickle import decode_tensor_pickle
from tests.formats.test_manifest import put, resealed
from tests.planning.test_codec import example
from tests.support.formats_metadata import stock_save
from tests.support.torch_files import index_of, saved

GOLDEN = Path(__file__).parent / "golden"


def newer(match: str) -> Any:
    """The one kind of error, which is never taken for damage."""
    return pytest.raises(UnsupportedFormatError, match=match)


# -- torch 2.15 ----------------------------------------------------------------------------------------------


def test_metadata_of_torch_2_15() -> None:
    """Its tensors' properties have a sixth field, strides; a committed file is read."""
    index = decode_torch_metadata((GOLDEN / "torch-2.15.metadata").read_bytes())
    assert [index.shape(row) for row in range(2)] == [(3, 2), (2,)]
    assert [index.dtype(row).name for row in range(2)] == ["float32", "bfloat16"]
    assert list(index.objects.fqns) == ["step"]


def test_a_checkpoint_with_six_properties_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides in the metadata change nothing: those of what is stored are in its record."""
    known: Any = TensorProperties.__getstate__  # six of them where torch is so new
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*known(self)[:5], (1, 3)))
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda self, state: None)
    wanted = {"w": torch.arange(6.0).reshape(2, 3).t(), "step": 7}
    stock_save(tmp_path, wanted)
    state = {"w": torch.zeros(3, 2), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["w"], wanted["w"]) and state["step"] == 7  # type: ignore[arg-type]
    assert verify(tmp_path).ok


# -- a later torch -------------------------------------------------------------------------------------------


def metadata(**changes: Any) -> Metadata:
    """Of a checkpoint without entries."""
    made = Metadata({}, storage_data={}, storage_meta=StorageMeta(save_id="1"), version="1.0.0")
    made.__dict__.update(changes)
    return made


def with_tensor(**chunk_changes: Any) -> Metadata:
    """Of a checkpoint with one tensor."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    chunk.__dict__.update(chunk_changes)
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [chunk])
    return metadata(state_dict_metadata={"w": entry})


def test_unknown_fields_of_torch() -> None:
    """A field of a later torch that says something is refused; an empty one is not."""
    for changed in (metadata(compression="zstd"), with_tensor(strides=(1,)), metadata(version="2.0.0")):
        with newer("newer torch"):
            decode_torch_metadata(pickle.dumps(changed))
    for known in (metadata(compression=None), metadata(version="1.4.0"), metadata(version=None)):
        assert decode_torch_metadata(pickle.dumps(known)).tensor_count == 0
    meta = StorageMeta(save_id="2")
    meta.__dict__["host"] = "h"
    assert decode_torch_metadata(pickle.dumps(metadata(storage_meta=meta))).provenance["save_id"] == "2"


def test_more_properties_than_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seventh property is a later torch's; fewer than five are nobody's."""
    for state, error in (((None,) * 7, UnsupportedFormatError), ((None,) * 4, CheckpointFormatError)):
        monkeypatch.setattr(TensorProperties, "__getstate__", lambda self, state=state: state)
        with pytest.raises(error) as caught:
            decode_torch_metadata(pickle.dumps(with_tensor()))
        assert type(caught.value) is error


@pytest.mark.parametrize("decode", [decode_torch_metadata, decode_tensor_pickle])
def test_unknown_dtypes_of_torch(decode: Callable[[bytes], Any]) -> None:
    """A name that can only be a dtype is a later torch's, others stay unsafe; nothing is run."""
    with newer("torch.float3_e1m1fn.*newer torch"):
        decode(b"\x80\x02ctorch\nfloat3_e1m1fn\n.")
    with pytest.raises(dcp.errors.UnsafeObjectError):
        decode(b"\x80\x02ctorch\nfloat_power\n.")


def rezipped(blob: bytes, version: bytes) -> bytes:
    """A torch.save file of another version."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, version if name.endswith("/version") else old.read(name))
    return target.getvalue()


def test_zips_of_a_later_torch() -> None:
    """Files, records and objects of torch.save above the version that torch reads today."""
    blob = saved(torch.ones(3))
    ways: list[Callable[[bytes], Any]] = [
        index_of,
        ObjectBlob,
        lambda data: locate_payload(lambda at, count: data[at : at + count], 0, len(data), fqn="w"),
    ]
    for read in ways:
        read(rezipped(blob, b"10\n"))
        with newer("version 11.*newer torch"):
            read(rezipped(blob, b"11\n"))


# -- a later dcphub ------------------------------------------------------------------------------------------


def later(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A changed manifest of the next minor version, with a checksum that fits."""

    def both(fields: dict[str, Any]) -> None:
        fields["version"] = [1, 1]
        change(fields)

    return resealed(both)


UNKNOWN_HERE = [
    put("chunks", "files", [3, None, 0, 1, 9, b"abc"]),
    put("tensors", "dtypes", [2, None, 250, 0, 0, b""]),
    lambda fields: fields["chunks"].pop("crcs"),
]


@pytest.mark.parametrize("change", UNKNOWN_HERE)
def test_a_later_minor_version_that_cannot_be_read(change: Any) -> None:
    """New packings, dtypes and columns are a newer dcphub's if the version says so, and else no writer's."""
    with newer(r"version 1\.1.*newer dcphub") as caught:
        decode_manifest(later(change))
    assert not is_damage(caught.value)
    with pytest.raises(CheckpointFormatError) as refused:
        decode_manifest(resealed(change))
    assert not isinstance(refused.value, UnsupportedFormatError)
    flipped = bytearray(later(change))
    flipped[40] ^= 1
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(bytes(flipped))


def test_planner_data_of_a_later_minor_version() -> None:
    """It is decoded when it is asked for, and the error says the same then."""
    index = decode_manifest(later(lambda fields: fields["planner_data"].pop("keys")))
    with newer("newer dcphub"):
        _ = index.planner_data


def test_verification_tells_newer_from_damaged(tmp_path: Path) -> None:
    """A finding of a kind of its own."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").unlink()
    (tmp_path / "manifest.msgpack").write_bytes(resealed(lambda fields: fields.update(version=[2, 0])))
    assert [found.kind for found in verify(tmp_path).findings] == ["unsupported"]


def test_plans_of_another_version() -> None:
    """Ranks of a newer dcphub are told to run the same one."""
    message = msgpack.unpackb(encode_save_columns(example())) | {"version": VERSION + 1}
    with newer("same version"):
        decode_save_columns(msgpack.packb(message))


# -- safetensors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2000])
def test_element_types_of_a_later_safetensors(count: int) -> None:
    """One or thousands of tensors of a type that is not known."""
    entries = {
        f"w{row}": {"dtype": "F3", "shape": [8], "data_offsets": [3 * row, 3 * row + 3]}
        for row in range(count)
    }
    text = json.dumps(entries).encode()
    data = struct.pack("<Q", len(text)) + text
    with newer("F3.*newer safetensors"):
        parse_header(lambda at, length: data[at : at + length], None)


# -- conversions ---------------------------------------------------------------------------------------------


def test_notes_on_structure_of_a_later_version(tmp_path: Path) -> None:
    """How containers were nested is not guessed from paths where it is noted in a newer way."""
    torch.save({"a": [torch.ones(2)]}, tmp_path / "m.pt")
    dcp.convert(tmp_path / "m.pt", tmp_path / "c", to="dcp", executor="inline")
    manifest = tmp_path / "c" / "manifest.msgpack"
    index = decode_manifest(manifest.read_bytes())
    structure = dict(index.provenance["structure"]) | {"version": VERSION + 1}
    changed = dataclasses.replace(index, provenance=dict(index.provenance) | {"structure": structure})
    manifest.write_bytes(encode_manifest(changed))
    with newer("newer dcphub"):
        dcp.convert(tmp_path / "c", tmp_path / "n.pt", to="torch", executor="inline")
