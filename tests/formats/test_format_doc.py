"""docs/format.md is enough to read a checkpoint: a second reader, written from it, reads what we write."""

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
import torch

from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, starts
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.native.record import begin_record
from dcp.storage.formats.plain import encode_plain
from tests.support.formats_indexes import int64, small_index

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
GOLDEN = Path(__file__).parent / "golden" / "record-bfloat16-2x3.zip"


class SecondReader:
    """Reads a folder by the document alone: msgpack, struct and zlib, nothing of the package."""

    def __init__(self, folder: Path) -> None:
        data = (folder / "manifest.msgpack").read_bytes()
        assert data[-11:-4] == bytes.fromhex("a5 63 72 63 33 32 ce")
        assert zlib.crc32(data[:-4]) == struct.unpack(">I", data[-4:])[0]
        self.folder = folder
        self.manifest = msgpack.unpackb(data)
        assert self.manifest["kind"] == "dcphub.manifest" and self.manifest["version"][0] == 1

    @staticmethod
    def unpack(size: int, packing: int, data: bytes) -> bytes:
        """A blob."""
        content = zlib.decompress(data) if packing else data
        assert len(content) == size
        return content

    def column(self, encoded: list[Any]) -> list[int]:
        """A column of integers."""
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
        """Byte strings."""
        lengths, joined = self.column(encoded[0]), self.unpack(*encoded[1])
        ends = accumulate(lengths)
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def strings(self, encoded: list[Any]) -> list[str]:
        """Strings."""
        return [row.decode() for row in self.rows(encoded)]

    def plain(self, data: bytes) -> Any:
        """Plain data."""

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

    def dtype_table(self) -> dict[int, tuple[str, int]]:
        """(name, item size) by code, from the document's own table."""
        cells = re.findall(r"\| (\d+) \| (\w+) \| (\d+) \|", DOCUMENT.read_text(encoding="utf-8"))
        return {int(code): (name, int(size)) for code, name, size in cells}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """(dtype name, shape, C-ordered bytes) by name, all chunks put together and verified."""
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
        """Values by name, of those that have one in the manifest."""
        objects = self.manifest["objects"]
        values = [self.plain(row) for row in self.rows(objects["values"])]
        rows = zip(self.strings(objects["fqns"]), self.column(objects["plain"]), strict=True)
        return {fqn: values[row] for fqn, row in rows if row >= 0}

    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """Where each value stood in the nested state dict."""
        section = self.manifest["planner_data"]
        positions, keys = iter(self.column(section["positions"])), iter(self.strings(section["keys"]))
        kinds = iter(self.column(section["is_position"]))
        rows = zip(self.strings(section["fqns"]), self.column(section["path_lengths"]), strict=True)
        return {
            fqn: tuple(next(positions) if next(kinds) else next(keys) for _ in range(length))
            for fqn, length in rows
        }


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Each tensor in two chunks (by its first dimension) in two files of records, and the manifest."""
    files = [bytearray(b"\0" * 7), bytearray()]
    boxes: list[tuple[list[int], list[int]]] = []
    rows: list[tuple[int, int, int, int, int]] = []
    crcs: list[list[int]] = []
    for tensor in tensors.values():
        code = dtypes.BY_NAME[str(tensor.dtype)[6:]].code
        first = 0
        for number, part in enumerate(tensor.tensor_split(2) if tensor.ndim else [tensor]):
            payload = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            file, begin = files[number], len(files[number])
            record = begin_record(code, tuple(part.shape), len(payload), begin)
            file += record.prefix + payload + record.suffix(crc32(payload))
            boxes.append(([first, 0][: tensor.ndim], list(part.shape)))
            rows.append((number, begin, len(file) - begin, begin + len(record.prefix), len(payload)))
            crcs.append([crc32(payload[at : at + (4 << 20)]) for at in range(0, len(payload), 4 << 20)])
            first += part.shape[0] if part.ndim else 0
    columns = np.array(rows, dtype=np.int64)
    names = [f"__{number}_0.3f9c2a1b.distcp" for number in range(2)]
    for name, content in zip(names, files, strict=True):
        (folder / name).write_bytes(content)
    index = CheckpointIndex(
        format="dcp",
        fqns=list(tensors),
        dtype_codes=np.array(
            [dtypes.BY_NAME[str(t.dtype)[6:]].code for t in tensors.values()], dtype=np.uint8
        ),
        shape_start=starts([tensor.ndim for tensor in tensors.values()]),
        shape_values=int64([size for tensor in tensors.values() for size in tensor.shape]),
        requires_grad=np.zeros(len(tensors), dtype=np.uint8),
        chunk_start=starts([2 if tensor.ndim else 1 for tensor in tensors.values()]),
        chunk_offsets=int64([offset for box in boxes for offset in box[0]]),
        chunk_sizes=int64([size for box in boxes for size in box[1]]),
        chunk_files=columns[:, 0],
        record_offsets=columns[:, 1],
        record_lengths=columns[:, 2],
        payload_offsets=columns[:, 3],
        payload_lengths=columns[:, 4],
        crc_start=starts([len(part) for part in crcs]),
        crcs=np.array([crc for part in crcs for crc in part], dtype=np.uint32),
        files=names,
        file_sizes=int64([len(content) for content in files]),
        objects=ObjectColumns(
            fqns=["lr", "betas", "step"],
            files=int64([-1, -1, -1]),
            offsets=int64([0, 0, 0]),
            lengths=int64([0, 0, 0]),
            crcs=int64([-1, -1, -1]),
            plain=int64([0, 1, 0]),
            values=[encode_plain(0.001) or b"", encode_plain({"x": (0.9, [1, 2**70], 1j)}) or b""],
        ),
        planner_data=small_index().planner_data,
        provenance={"save_id": "3f9c2a1b"},
    )
    (folder / "manifest.msgpack").write_bytes(encode_manifest(index))


def test_a_second_reader_reads_a_checkpoint(tmp_path: Path) -> None:
    """Tensors of several shapes, sizes and dtypes, objects and paths are read by the document alone."""
    tensors = {
        "matrix": torch.randn(5, 300).bfloat16(),
        "vector": torch.arange(7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "large": torch.randint(0, 255, (3, 3_000_001), dtype=torch.uint8),
        "eight": torch.arange(6.0).to(torch.float8_e5m2),
    }
    tensors |= {f"layers.{number}.weight": torch.full((2, 8), number * 1.0) for number in range(3000)}
    write_checkpoint(tmp_path, tensors)
    reader = SecondReader(tmp_path)
    found = reader.tensors()
    assert list(found) == list(tensors)
    for fqn, tensor in tensors.items():
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found[fqn] == (str(tensor.dtype)[6:], tuple(tensor.shape), content), fqn
    assert reader.objects() == {"lr": 0.001, "betas": {"x": (0.9, [1, 2**70], 1j)}, "step": 0.001}
    assert reader.paths() == small_index().planner_data
    assert reader.plain(reader.unpack(*reader.manifest["provenance"])) == {"save_id": "3f9c2a1b"}


def test_the_table_of_dtypes_is_complete() -> None:
    """The document lists every code with its name, size and storage class."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"\| (\d+) \| (\w+) \| (\d+) \|(?: (\w+) )?", text)
    documented = {(int(code), name, int(size), storage or None) for code, name, size, storage in rows}
    assert documented == {(d.code, d.name, d.itemsize, d.storage_class) for d in dtypes.BY_CODE.values()}


def test_the_examples_are_real() -> None:
    """The bytes shown for a record are those of the golden record; the plain value's are those encoded."""
    text = DOCUMENT.read_text(encoding="utf-8")
    golden = GOLDEN.read_bytes()
    assert f"has {len(golden)} bytes" in text
    lines = re.findall(r"^([0-9a-f]{3})  ((?:[0-9a-f]{2} |\.\.\. +)+)", text, re.MULTILINE)
    assert len(lines) == 14
    for position, shown in lines:
        at = int(position, 16)
        first = bytes.fromhex(shown.split("...")[0])
        assert golden[at : at + len(first)] == first, position
    assert encode_plain((1, 2.5)) == bytes.fromhex("93 c7 00 01 01 cb 40 04 00 00 00 00 00 00")
    assert "`93 c7 00 01 01 cb 40 04 00 00 00 00 00 00`" in text
