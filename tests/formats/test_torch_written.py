"""What is written for torch. Internal: any index as `.metadata`, zips beyond 4 GiB; saves make few such."""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from dcp.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.torch.metadata.writer import MAX_PLAIN_DEPTH, encode_torch_metadata
from dcp.storage.formats.torch.zip_writer import ZipLayout
from dcp.storage.torch_compat import strides_of, tensor_properties
from tests.support.examples import examples
from tests.support.formats_indexes import (
    assert_same,
    decode_torch_metadata,
    index_of,
    indexes_of_torch,
    make_index,
    rich_state_dict,
    stock_save,
)


def decode(index: CheckpointIndex) -> Metadata:
    """What stock reads from the encoded index."""
    metadata = pickle.loads(encode_torch_metadata(index, checkpoint_id="here", save_id="abc"))
    assert isinstance(metadata, Metadata)
    return metadata


def test_equals_what_stock_wrote(tmp_path: Path) -> None:
    """The metadata of a stock save, through our index and encoder, is the original: each object with exactly
    the attributes that stock gives it."""
    original = stock_save(tmp_path, rich_state_dict())
    copy = decode(index_of(original))
    for fqn, entry in original.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and strides_of(entry.properties) is not None:
            # from torch 2.15 on: of the tensor that was saved, and refused by older ones
            entry.properties = tensor_properties(entry.properties.dtype, entry.properties.requires_grad, None)
        assert vars(copy.state_dict_metadata[fqn]).keys() == vars(entry).keys()
    expected_meta = StorageMeta(checkpoint_id="here", save_id="abc")
    assert copy == dataclasses.replace(original, storage_meta=expected_meta)
    places = {str(vars(key)): vars(info) for key, info in original.storage_data.items()}
    assert {str(vars(key)): vars(info) for key, info in copy.storage_data.items()} == places
    assert [type(value) for value in copy.planner_data.values()] == [tuple] * len(original.planner_data)
    tensor = copy.state_dict_metadata["weights"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert type(tensor.size) is type(tensor.chunks[0].offsets) is torch.Size
    assert tensor.properties.memory_format is torch.contiguous_format


def test_objects_without_blob_are_left_out() -> None:
    """An object stored only as a plain value has no place in .metadata; the others are complete."""
    index = make_index({}, ["stored", "plain"])
    objects = dataclasses.replace(
        index.objects, files=np.array([0, -1]), plain=np.array([-1, 0]), values=[b"\xc0"]
    )
    copy = decode(dataclasses.replace(index, objects=objects))
    assert list(copy.state_dict_metadata) == ["stored"]
    assert list(copy.storage_data) == [MetadataIndex("stored")]


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"a": ("a", 0, "b"), "b": (), "c": (1 << 70, -1, -(1 << 40), 1 << 31, 1 << 5000)},
        {"a": (True, 1)},
        {"a": (1, True)},
        {1: ("a",)},
        {"a": ["list"], "b": {"deep": [1.5, None, b"x", ("t",)]}},
        "text\ud800",
    ],
)
def test_planner_data_keeps_values_and_types(data: Any) -> None:
    """Mappings and other plain data arrive equal, with exact types: True does not become 1."""
    copy = decode(make_index({}, planner_data=data)).planner_data
    assert repr(copy) == repr(data)


def test_planner_data_that_is_not_plain_is_refused() -> None:
    """Objects of other classes, and nesting without end, are refused with the type or limit named."""
    with pytest.raises(PlanError, match=r"torch\.Size") as caught:
        decode(make_index({}, planner_data={"a": {"b": torch.Size([1])}}))
    assert caught.value.type_name == "torch.Size"
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PlanError, match=str(MAX_PLAIN_DEPTH)):
        decode(make_index({}, planner_data=endless))


@examples(60)
@given(indexes_of_torch())
def test_any_index_comes_back(index: CheckpointIndex) -> None:
    """Of what is encoded stock's unpickler (C and Python) and our reader make the index again."""
    index.check()
    data = encode_torch_metadata(index, checkpoint_id="c", save_id="s")
    pickletools.dis(data, out=io.StringIO())  # raises on a malformed stack, memo or frame
    again = decode_torch_metadata(data)
    assert_same(again, index)
    assert again.provenance == {"save_id": "s", "checkpoint_id": "c", "torch_metadata_version": "1.0.0"}
    assert (again.file_sizes == UNKNOWN).all()
    if all(hasattr(torch, dtypes.BY_CODE[code].name) for code in set(index.dtype_codes.tolist())):
        metadata = pickle.loads(data)
        assert pickle._Unpickler(io.BytesIO(data)).load() == metadata
        assert_same(index_of(metadata), index)


# -- zips, as APPNOTE.TXT has them ---------------------------------------------------------------------------

FAR = 1 << 32


def extra_of(offset: int, size: int) -> bytes:
    """The zip64 field of what is too large for 32 bits."""
    wide = ([size, size] if size >= FAR - 1 else []) + ([offset] if offset >= FAR - 1 else [])
    return struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""


def header(name: bytes, offset: int, size: int, crc: int, flags: int) -> bytes:
    """A local header, as 4.3.7 and torch's padding have it."""
    zip64 = extra_of(offset, size)
    padding = -(offset + 30 + len(name) + len(zip64) + 4) % 64
    extra = zip64 + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    short = min(size, FAR - 1)
    fixed = struct.pack("<4s5H3I2H", b"PK\3\4", 45 if zip64 else 20, flags, 0, 0, 33, crc, short, short, 0, 0)
    return fixed[:26] + struct.pack("<HH", len(name), len(extra)) + name + extra


def central(name: bytes, offset: int, size: int, crc: int, flags: int) -> bytes:
    """A record of the central directory, as 4.3.12 has it."""
    zip64 = extra_of(offset, size)
    version, short, at = 45 if zip64 else 20, min(size, FAR - 1), min(offset, FAR - 1)
    fixed = struct.pack("<4s6H3I", b"PK\1\2", version, version, flags, 0, 0, 33, crc, short, short)
    return fixed + struct.pack("<5H2I", len(name), len(zip64), 0, 0, 0, 0, at) + name + zip64


def reference(
    sizes: list[int], crcs: list[int], keys: list[int], contents: dict[int, bytes], folder: str
) -> tuple[dict[int, bytes], set[tuple[int, int]]]:
    """The bytes between reserved contents by offset, and the places of CRCs; entry by entry."""
    position, begin, text, directory, inner = 0, 0, b"", b"", []
    parts: dict[int, bytes] = {}
    holes: set[tuple[int, int]] = set()
    entries = [("data.pkl", b"pickle", 6, crc32(b"pickle"), -1), ("empty", b"", 0, 0, -1)]
    for number, (size, crc, key) in enumerate(zip(sizes, crcs, keys, strict=True)):
        data = contents.get(number)
        known = crc32(data) if data is not None else crc
        entries.append((f"data/{number}", data, size, known, key))  # type: ignore[arg-type]
    entries.append(("version", b"3\n", 2, crc32(b"3\n"), -1))
    for name, data, size, crc, key in entries:
        encoded, offset = f"{folder}/{name}".encode(), position
        flags = (8 if size else 0) | (0 if encoded.isascii() else 2048)
        text += header(encoded, offset, size, 0 if data is None else crc, flags)
        position = begin + len(text)
        if data is None:
            parts[begin] = text
            position, text = position + size, b""
            begin = position
        else:
            text, position = text + data, position + size
        if size:
            wide = size >= FAR - 1 or offset >= FAR - 1
            holes |= {(key, position + 4)} if key >= 0 else set()
            text += struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", crc, size, size)
            position = begin + len(text)
        inner += [(key, len(directory) + 16)] if key >= 0 else []
        directory += central(encoded, offset, size, crc, flags)
    holes |= {(key, position + at) for key, at in inner}
    count, length, end = len(entries), len(directory), b""
    if count >= 65535 or position >= FAR - 1:
        end += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, position)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, position + length, 1)
    short = min(count, 65535)
    end += struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, short, short, length, min(position, FAR - 1), 0)
    parts[begin] = text + directory + end
    return parts, holes


def joined(parts: dict[int, bytes]) -> dict[int, bytes]:
    """``parts`` without the cuts between those that follow one another."""
    found: dict[int, bytes] = {}
    last = -1
    for offset, data in sorted(parts.items()):
        if last >= 0 and last + len(found[last]) == offset:
            found[last] += data
        else:
            found[last := offset] = data
    return found


@pytest.mark.parametrize("seed", range(20))
def test_entries_at_once_have_the_bytes_of_one_after_the_other(seed: int) -> None:
    """Sizes alike or not, known contents and CRCs among those to come, names of other lengths, and zip64."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 2, 11, 120, 1_100])
    large = [5 << 30, FAR - 1, FAR, FAR - 2, 1 << 31] if seed % 2 else []
    pool = [0, 1, 63, 64, 256, 256, 256, 4096, rng.randrange(500)]
    sizes = [rng.choice(large if large and rng.random() < 0.02 else pool) for _ in range(count)]
    contents = {n: rng.randbytes(rng.choice([0, 5, 80])) for n in range(count) if rng.random() < 0.1}
    sizes = [len(contents[n]) if n in contents else size for n, size in enumerate(sizes)]
    is_open = [size > 0 and n not in contents and rng.random() < 0.5 for n, size in enumerate(sizes)]
    keys = [3 * n if one else -1 for n, one in enumerate(is_open)]
    crcs = [0 if one or not size else rng.getrandbits(32) for one, size in zip(is_open, sizes, strict=True)]
    folder = rng.choice(["archive", "modèle"])
    parts, holes = reference(sizes, crcs, keys, contents, folder)

    archive = ZipLayout(folder)
    archive.add("data.pkl", b"pickle")
    archive.add("empty", b"")
    columns = [np.array(column, np.int64) for column in (sizes, keys, crcs)]
    begins = archive.reserve("data", columns[0], columns[1], columns[2], contents).tolist()
    archive.add("version", b"3\n")
    archive.finish()
    made = dict(zip(archive.offsets, archive.parts, strict=True))
    assert joined(made) == joined(parts)
    assert set(archive.crc_holes) == holes
    assert len(archive.crc_holes) == len(holes)
    assert all(begin % 64 == 0 for begin in begins)
    last = max(made)
    assert archive.size_bytes == last + len(made[last])
