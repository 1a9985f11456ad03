"""docs/reference/format.md is sufficient to read a checkpoint: a second reader is written from the page."""

from __future__ import annotations

import math
import re
import struct
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks
from tests.support.values import raw

DOCUMENT = Path(__file__).parents[2] / "docs/reference/format.md"
GOLDEN = Path(__file__).parent / "golden" / "record-bfloat16-2x3.zip"


class SecondReader:
    """Reader of a folder, written from the page with msgpack, struct and zlib, without the package."""

    def __init__(self, folder: Path) -> None:
        data = (folder / "manifest.msgpack").read_bytes()
        assert data[-11:-4] == bytes.fromhex("a5 63 72 63 33 32 ce")
        assert zlib.crc32(data[:-4]) == struct.unpack(">I", data[-4:])[0]
        self.folder = folder
        self.manifest = msgpack.unpackb(data)
        assert self.manifest["kind"] == "dcphub.manifest" and self.manifest["version"][0] == 1

    @staticmethod
    def unpack(size: int, packing: int, data: bytes) -> bytes:
        """Decompress a blob."""
        content = zlib.decompress(data) if packing else data
        assert len(content) == size
        return content

    def column(self, encoded: list[Any]) -> list[int]:
        """Decode a column of integers."""
        count, first, base, width, packing, data = encoded
        stored = count if first is None else count - 1
        code = {0: "", 1: "B", 2: "H", 4: "I", 8: "q"}[width]
        content = self.unpack(stored * width, packing, data)
        residuals = struct.unpack(f"<{stored}{code}", content) if width else [0] * stored
        if first is None:
            return [base + residual for residual in residuals]
        values = [first]
        for residual in residuals:
            values.append(values[-1] + base + residual)
        return values

    def rows(self, encoded: list[Any]) -> list[bytes]:
        """Decode byte strings."""
        lengths, joined = self.column(encoded[0]), self.unpack(*encoded[1])
        ends = accumulate(lengths)
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def strings(self, encoded: list[Any]) -> list[str]:
        """Decode strings."""
        return [row.decode() for row in self.rows(encoded)]

    def plain(self, data: bytes) -> Any:
        """Decode plain data."""

        def tuples(value: Any) -> Any:
            if isinstance(value, list):
                items = [tuples(item) for item in value]
                is_tuple = bool(items) and items[0] == msgpack.ExtType(1, b"")
                return tuple(items[1:]) if is_tuple else items
            if isinstance(value, dict):
                return {tuples(key): tuples(item) for key, item in value.items()}
            if isinstance(value, msgpack.ExtType) and value.code == 2:
                return complex(*struct.unpack("<dd", value.data))
            if isinstance(value, msgpack.ExtType) and value.code == 3:
                return int.from_bytes(value.data, "little", signed=True)
            return value

        return tuples(msgpack.unpackb(data, strict_map_key=False))

    @staticmethod
    def dtype_table() -> dict[int, tuple[str, int]]:
        """Return (name, item size) by code, from the table of the page."""
        cells = re.findall(r"\| (\d+) \| (\w+) \| (\d+) \|", DOCUMENT.read_text(encoding="utf-8"))
        return {int(code): (name, int(size)) for code, name, size in cells}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Return (dtype name, shape, C-ordered bytes) by name, joined from all chunks and verified."""
        tensors, chunks = self.manifest["tensors"], self.manifest["chunks"]
        names = self.strings(self.manifest["files"]["names"])
        shapes, chunk_rows = iter(self.column(tensors["shapes"])), iter(range(1 << 60))
        boxes = iter(self.column(chunks["offsets"])), iter(self.column(chunks["sizes"]))
        files, records = self.column(chunks["files"]), self.column(chunks["record_offsets"])
        heads, has_crcs = self.column(chunks["payload_heads"]), self.column(chunks["has_crcs"])
        crcs, table = iter(self.column(chunks["crcs"])), self.dtype_table()
        result = {}
        for fqn, code, ndim, chunk_count in zip(
            self.strings(tensors["fqns"]),
            self.column(tensors["dtypes"]),
            self.column(tensors["ndims"]),
            self.column(tensors["chunk_counts"]),
            strict=True,
        ):
            name, itemsize = table[code]
            shape = tuple(next(shapes) for _ in range(ndim))
            whole = np.zeros((*shape, itemsize), dtype=np.uint8)
            for chunk in (next(chunk_rows) for _ in range(chunk_count)):
                offsets = [next(boxes[0]) for _ in range(ndim)]
                sizes = [next(boxes[1]) for _ in range(ndim)]
                length = math.prod(sizes) * itemsize
                with (self.folder / names[files[chunk]]).open("rb") as file:
                    file.seek(records[chunk] + heads[chunk])
                    payload = file.read(length)
                if has_crcs[chunk]:
                    for begin in range(0, length, 4194304):
                        assert zlib.crc32(payload[begin : begin + 4194304]) == next(crcs)
                box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
                whole[box] = np.frombuffer(payload, dtype=np.uint8).reshape(*sizes, itemsize)
            result[fqn] = (name, shape, whole.tobytes())
        return result

    def objects(self) -> dict[str, Any]:
        """Return values by name, for objects with a value in the manifest."""
        objects = self.manifest["objects"]
        values = [self.plain(row) for row in self.rows(objects["values"])]
        rows = zip(self.strings(objects["fqns"]), self.column(objects["plain"]), strict=True)
        return {fqn: values[row] for fqn, row in rows if row >= 0}

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Return the path of each value in the nested state dict."""
        section = self.manifest["planner_data"]
        positions, keys = iter(self.column(section["positions"])), iter(self.strings(section["keys"]))
        kinds = iter(self.column(section["is_position"]))
        rows = zip(self.strings(section["fqns"]), self.column(section["path_lengths"]), strict=True)
        return {
            fqn: tuple(next(positions) if next(kinds) else next(keys) for _ in range(length))
            for fqn, length in rows
        }


def save_as_rank(rank: int, world_size: int, folder: str) -> None:
    """Save a matrix in two shards, and entries that all ranks have."""
    mesh = init_device_mesh("cpu", (world_size,))
    tensors = whole_tensors()
    tensors["matrix"] = distribute_tensor(tensors["matrix"], mesh, [Shard(0)], src_data_rank=None)
    nested = {"x": (0.9, [1, 2**70], 1j)}
    dcp.save({**tensors, "lr": 0.001, "betas": nested, "step": 0.001}, checkpoint_id=folder)


def whole_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of several shapes, sizes and dtypes, and many equal ones."""
    tensors = {
        "matrix": torch.arange(1500.0).view(5, 300).bfloat16(),
        "vector": torch.arange(7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "large": torch.arange(251, dtype=torch.uint8).repeat(35_857)[:9_000_003].view(3, 3_000_001),
        "eight": torch.arange(6.0).to(torch.float8_e5m2),
    }
    return tensors | {f"layers.{number}.weight": torch.full((2, 8), number * 1.0) for number in range(1000)}


def test_a_second_reader_reads_a_checkpoint(tmp_path: Path) -> None:
    """The second reader reads tensors that two ranks saved, values and paths."""
    run_ranks(2, save_as_rank, str(tmp_path))
    reader, tensors = SecondReader(tmp_path), whole_tensors()
    found = reader.tensors()
    assert set(found) == set(tensors)
    for fqn, tensor in tensors.items():
        assert found[fqn] == (str(tensor.dtype)[6:], tuple(tensor.shape), raw(tensor)), fqn
    assert reader.objects() == {"lr": 0.001, "betas.x": (0.9, [1, 2**70], 1j), "step": 0.001}
    assert reader.paths()["betas.x"] == ("betas", "x")
    provenance = reader.plain(reader.unpack(*reader.manifest["provenance"]))
    assert provenance["world_size"] == 2


def test_the_table_of_dtypes_is_complete(tmp_path: Path) -> None:
    """The table has each dtype of torch that can be stored, with the size and the code of the manifest."""
    known = {name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}
    names = {str(dtype)[6:] for dtype in known.values()}
    table = SecondReader.dtype_table()
    storable = {name for name, _ in table.values()} & names
    assert len(storable) > 20
    state = {name: torch.zeros(4, dtype=getattr(torch, name)) for name in storable}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    for name, (dtype, shape, content) in SecondReader(tmp_path).tensors().items():
        assert (dtype, shape, len(content)) == (name, (4,), 4 * state[name].itemsize)
    for name in names - storable:
        with pytest.raises((dcp.CheckpointError, RuntimeError, NotImplementedError)):
            dcp.save(
                {"t": torch.zeros(4, dtype=getattr(torch, name))}, checkpoint_id=tmp_path / name, no_dist=True
            )


def test_the_examples_equal_real_bytes() -> None:
    """The bytes on the page are the bytes of the golden record and of the encoded plain value."""
    text = DOCUMENT.read_text(encoding="utf-8")
    golden = GOLDEN.read_bytes()
    assert f"has {len(golden)} bytes" in text
    lines = re.findall(r"^([0-9a-f]{3})  ((?:[0-9a-f]{2} |\.\.\. +)+)", text, re.MULTILINE)
    assert len(lines) == 14
    for position, shown in lines:
        at = int(position, 16)
        first = bytes.fromhex(shown.split("...")[0])
        assert golden[at : at + len(first)] == first, position
    assert "`93 c7 00 01 01 cb 40 04 00 00 00 00 00 00`" in text
