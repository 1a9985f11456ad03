"""torch.save files as indexes, with stock torch as the oracle."""

from __future__ import annotations

import io
import os
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
import torch

from dcp.storage.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from dcp.storage.formats import dtypes
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.torch.file import index_of_torch_file
from dcp.storage.formats.torch.python_values import decode_value
from dcp.storage.formats.torch.structure import restore_structure
from tests.support.torch_files import as_bytes, assert_same, index_of, reader, restored, saved, tensor_at


def _model_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


CASES: dict[str, Any] = {
    "flat": {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(3, dtype=torch.int64)},
    "ordered": OrderedDict(z=torch.ones(2), a=torch.zeros(1)),
    "nested": {"a": {"b": [torch.ones(1), {"c": 3, "d": (1, 2.5, None)}]}, "e": [1, 2], "f": []},
    "int keys": {"state": {0: {"x": torch.ones(2)}, 10: {"x": torch.zeros(2)}}, "g": {1: "one", "b": 2}},
    "tuples": {"t": (torch.ones(2), [torch.zeros(1)], 5), "u": (1, (2, 3)), "v": [(torch.ones(1),)]},
    "ordered in tuple": {"t": (OrderedDict(a=1), 2), "c": Counter("aab")},
    "empty": {"a": {}, "b": {"c": {}, "d": torch.ones(1)}, "e": OrderedDict(), "f": (), "g": []},
    "values": {
        "s": "text",
        "i": -(2**70),
        "f": float("-inf"),
        "n": None,
        "y": True,
        "b": b"\x00\xff",
        "c": 1 + 2j,
    },
    "size": {"shape": torch.Size([2, 3])},
    "root list": [torch.ones(2), {"a": 1}],
    "root plain list": [1, "two"],
    "root tuple": (torch.ones(2), 3),
    "root tensor": torch.ones(2, 2),
    "root value": "just a string",
    "root empty": {},
    "odd names": {"a/b\\c": torch.ones(1), "ü\ud800": torch.ones(2), "": torch.ones(3), "..": torch.ones(1)},
    "float keys": {"m": {1.5: torch.ones(1), None: 2, True: 3, (1, "x"): 4}},
    "shapes": {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "long": torch.zeros([1] * 20)},
}


@pytest.mark.parametrize("name", CASES)
def test_structure_and_values_survive(name: str) -> None:
    """What the index describes is what torch.load gives: values, types, order of keys and nesting."""
    data = saved(CASES[name])
    oracle = torch.load(io.BytesIO(data), weights_only=True)
    assert_same(restored(index_of(data), data), oracle)


def test_module_and_optimizer_states() -> None:
    """Real states: OrderedDicts with _metadata, int keys, lists of groups, scalar steps."""
    data = saved(_model_state())
    index = index_of(data)
    assert_same(restored(index, data), torch.load(io.BytesIO(data), weights_only=True))
    assert "optimizer.state.0.exp_avg" in index.position
    assert index.planner_data["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")


@pytest.mark.parametrize("name", sorted(dtypes.BY_NAME))
def test_dtypes(name: str) -> None:
    """Every dtype that torch can store comes back with its bits."""
    dtype = getattr(torch, name)
    raw = torch.arange(16, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    data = saved({"x": tensor})
    index = index_of(data)
    assert index.dtype(0).name == name
    assert as_bytes(tensor_at(index, data, 0)) == as_bytes(tensor)


def _strided() -> dict[str, torch.Tensor]:
    base = torch.arange(120.0)
    return {
        "transposed": base.view(10, 12).t(),
        "channels_last": torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "expanded scalar": torch.tensor(5.0).expand(2, 3),
        "every other": base[::2],
        "columns": base.view(10, 12)[:, 3:7],
        "windows": base.unfold(0, 7, 3),
        "view": base[100:],
        "one of a column": base.view(10, 12)[:, :1],
        "empty": base.view(10, 12)[:, 5:5].t(),
    }


def test_strides_views_and_ties() -> None:
    """Views of one storage share its bytes; strided ones are described by their strides."""
    tensors = _strided()
    tensors["tied"] = tensors["transposed"]
    data = saved(tensors)
    index = index_of(data)
    for row, fqn in enumerate(index.fqns):
        assert as_bytes(tensor_at(index, data, row)) == as_bytes(tensors[fqn])
        assert (row in index.payload_strides) == (not tensors[fqn].is_contiguous())
    position = index.position
    assert index.payload_offsets[position["tied"]] == index.payload_offsets[position["transposed"]]
    assert index.stride_orders[position["transposed"]] == (1, 0)
    assert index.stride_orders[position["channels_last"]] == (0, 2, 3, 1)
    assert position["columns"] not in index.stride_orders
    assert len(np.unique(index.record_offsets)) == 4


def test_parameters_and_tensors_with_attributes() -> None:
    """Parameters, buffers and tensors with attributes are tensors; requires_grad is kept."""
    plain = torch.ones(2)
    plain.note = "attribute"  # type: ignore[attr-defined]
    state = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(1), requires_grad=False),
        "b": torch.nn.Buffer(torch.zeros(3)),
        "noted": plain,
        "leaf": torch.ones(1, requires_grad=True),
    }
    index = index_of(saved(state))
    assert dict(zip(index.fqns, index.requires_grad.tolist(), strict=True)) == {
        "p": 1,
        "frozen": 0,
        "b": 0,
        "noted": 0,
        "leaf": 1,
    }


class Custom:
    """A class that no allow-list knows."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)


class CustomDict(dict[str, Any]):
    """A dict that no allow-list knows."""


def test_what_cannot_be_read_spoils_its_own_entry_alone() -> None:
    """Foreign classes, sparse and quantised tensors are listed with what they need; the others are there."""
    state = {
        "good": torch.arange(3.0),
        "custom": Custom(),
        "custom dict": CustomDict(a=torch.ones(1)),
        "mask": np.ma.zeros(2),
        "array": np.array([1, None]),
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "list": [1, Custom()],
        "function": torch.nn.functional.relu,
        "nested": {"deep": [torch.ones(2), Custom()]},
        "also good": {"x": 5},
    }
    data = saved(state)
    index = index_of(data)
    refused = index.provenance["refused_objects"]
    assert set(index.fqns) == {"good", "nested.deep.0"}
    assert index.objects.fqns == ["also good.x"]
    assert refused.keys() == state.keys() - {"good", "nested", "also good"} | {"nested.deep.1"}
    assert refused["custom"].endswith("Custom") and refused["array"] == "numpy.dtype('O8')"
    assert refused["sparse"] == "sparse tensor" and refused["dtype"] == "torch.float32"
    assert as_bytes(tensor_at(index, data, 0)) == as_bytes(torch.arange(3.0))


def test_a_pickled_module_is_refused_with_the_way_out() -> None:
    """torch.save(model) is one object of a class that would have to be run."""
    with pytest.raises(UnsafeObjectError, match="state_dict"):
        index_of(saved(torch.nn.Linear(2, 2)))


def test_record_checksums_are_those_of_the_storages() -> None:
    """record_crcs are CRC-32 of whole storages, and none where torch was told not to compute them."""
    state = {"a": torch.arange(100.0), "view": torch.arange(100.0)[5:9], "empty": torch.zeros(0)}
    data = saved(state)
    index = index_of(data)
    for row, crc in index.record_crcs.items():
        begin, length = int(index.record_offsets[row]), int(index.record_lengths[row])
        assert crc32(data[begin : begin + length]) == crc
    assert index.payload_crc(0) == crc32(as_bytes(state["a"]))
    assert index.payload_crc(1) is None and index.payload_crc(2) == 0
    torch.serialization.set_crc32_options(False)
    try:
        assert index_of(saved(state)).record_crcs == {}
    finally:
        torch.serialization.set_crc32_options(True)


def test_many_tensors_cost_few_reads() -> None:
    """The directory, the pickle and two headers are read; how many tensors there are does not matter."""
    state = {f"layers.{number}.weight": torch.full((5,), float(number)) for number in range(20_000)}
    data = saved(state)
    log: list[tuple[int, int]] = []
    index = index_of_torch_file(reader(data, log), len(data), "model.pt")
    assert index.tensor_count == 20_000
    assert len(log) <= 10
    for row in (0, 1, 9_999, 19_999):
        assert tensor_at(index, data, row).tolist() == [float(row)] * 5


class _SparseFile(io.RawIOBase):
    """Leaves out large pieces, which are zeros here."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        """As a file does."""
        view = memoryview(data).cast("B")
        if len(view) > 1 << 20:
            self._file.seek(len(view), 1)
        else:
            self._file.write(view)
        return len(view)

    def close(self) -> None:
        """As a file does."""
        self._file.close()


def test_files_beyond_4_gib(tmp_path: Path) -> None:
    """torch's own zip64: entries of more than 4 GiB, and behind them, are found without more reads."""
    path, large = tmp_path / "large.pt", torch.empty((1 << 32) + 100, dtype=torch.uint8)
    torch.serialization.set_crc32_options(False)  # which would read four gigabytes
    try:
        file = _SparseFile(path)
        torch.save({"a": torch.arange(5.0), "large": large, "b": torch.arange(7.0)}, cast(IO[bytes], file))
        file.close()
    finally:
        torch.serialization.set_crc32_options(True)
    log: list[tuple[int, int]] = []
    with path.open("rb") as stream:

        def read(offset: int, length: int) -> bytes:
            log.append((offset, length))
            return os.pread(stream.fileno(), length, offset)

        index = index_of_torch_file(read, path.stat().st_size, "large.pt")
        row = index.position["b"]
        stored = os.pread(stream.fileno(), int(index.payload_lengths[row]), int(index.payload_offsets[row]))
    assert index.payload_offsets[row] > 1 << 32 and index.payload_lengths[index.position["large"]] > 1 << 32
    assert stored == as_bytes(torch.arange(7.0))
    assert len(log) <= 8 and sum(length for _, length in log) < 1 << 20


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_alignments(alignment: int) -> None:
    """Storages are found with any alignment that torch was told to give them."""
    tensors = {f"t{number}": torch.arange(float(number * 7)) for number in range(40)}
    before = torch.serialization.get_default_load_endianness()
    assert before is None
    torch.utils.serialization.config.save.storage_alignment = alignment
    try:
        data = saved(tensors)
    finally:
        torch.utils.serialization.config.save.storage_alignment = 64
    assert_same(restored(index_of(data), data), tensors)


@pytest.mark.parametrize("padding", [b"", b"\x99\x99\x04\x00abcd"])
def test_zips_of_other_writers(padding: bytes) -> None:
    """A file that Python's zipfile packed anew has neither padding nor descriptors, or fields of its own."""
    state = {f"t{number}": torch.arange(float(number)) for number in range(30)}
    original, packed = zipfile.ZipFile(io.BytesIO(saved(state))), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as target:
        for info in original.infolist():
            entry = zipfile.ZipInfo(info.filename)
            entry.extra = padding
            target.writestr(entry, original.read(info))
    data = packed.getvalue()
    assert_same(restored(index_of(data), data), torch.load(io.BytesIO(data), weights_only=True))


def test_older_formats_are_recognised(tmp_path: Path) -> None:
    """The formats of before torch 1.6, bare pickles and TorchScript say what they are and what to do."""
    path = tmp_path / "legacy.pt"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedFormatError, match=r"before 1\.6"):
        index_of(path.read_bytes())
    with pytest.raises(UnsupportedFormatError, match="tar format"):
        index_of(b"\0" * 257 + b"ustar" + b"\0" * 600)
    with pytest.raises(UnsupportedFormatError, match="bare pickle"):
        index_of(b"\x80\x04N.")
    archive = zipfile.ZipFile(path, "w")
    for name in ("data.pkl", "constants.pkl"):
        archive.writestr(f"model/{name}", b"\x80\x02N.")
    archive.close()
    with pytest.raises(UnsupportedFormatError, match="TorchScript"):
        index_of(path.read_bytes())
    for data in (b"", b"PK", b"hello", b"PK\3\4" + b"\0" * 100):
        with pytest.raises(CheckpointFormatError):
            index_of(data)


def test_other_byte_order_is_refused() -> None:
    """A big-endian machine's file would load as other numbers."""
    original, packed = zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(1)}))), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as target:
        for info in original.infolist():
            target.writestr(info.filename, b"big" if "byteorder" in info.filename else original.read(info))
    with pytest.raises(UnsupportedFormatError, match="big-endian"):
        index_of(packed.getvalue())


def test_names_that_collide_are_refused() -> None:
    """Two entries under one flat name could not be told apart."""
    for state in ({"a.b": 1, "a": {"b": 2}}, {"m": {1: torch.ones(1), "1": torch.ones(1)}}):
        with pytest.raises(UnsupportedFormatError, match="rename one"):
            index_of(saved(state))


def test_a_flipped_bit_in_the_pickle_is_damage() -> None:
    """Shapes and strides are read from the pickle, so its checksum is compared."""
    data = bytearray(saved({"a": torch.ones(7)}))
    data[data.index(b"FloatStorage") + 1] ^= 1
    with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
        index_of(bytes(data))


def test_the_index_travels_as_a_manifest() -> None:
    """Ranks share an index in the form of a manifest: strides, checksums and structure survive."""
    data = saved({**_strided(), "n": {1: (torch.ones(2), 3)}, "s": torch.Size([1])})
    index = index_of(data)
    again = decode_manifest(encode_manifest(index))
    assert again.payload_strides == index.payload_strides and again.record_crcs == index.record_crcs
    assert (again.payload_lengths == index.payload_lengths).all()
    assert again.stride_orders == index.stride_orders
    assert_same(restored(again, data), torch.load(io.BytesIO(data), weights_only=True))


@pytest.mark.parametrize(
    "structure",
    [
        {"containers": 5},
        {"containers": [None]},
        {"containers": [{"path": "a"}]},
        {"containers": [{"path": [["x"]]}]},
        {"containers": [{"path": [], "keys": 3}]},
        {"containers": [{"path": ["a", "b"], "kind": "dict"}]},
        {"containers": [{"path": ["x"] * 100, "kind": "dict"}]},
    ],
)
def test_malformed_notes_on_structure(structure: Any) -> None:
    """Notes come out of a manifest, which anybody may have written."""
    with pytest.raises(CheckpointFormatError):
        restore_structure(structure, {"a": ("a",)}, lambda fqn: fqn)


def test_large_values_are_read() -> None:
    """Up to what the whole pickle may have; above that the error says what to do."""
    state = {"text": "x" * (17 << 20), "data": bytes(18 << 20), "w": torch.ones(2)}
    index = index_of(saved(state))
    objects = index.objects
    values = [decode_value(objects.values[number]) for number in objects.plain.tolist()]
    assert dict(zip(objects.fqns, values, strict=True)) == {"text": state["text"], "data": state["data"]}
    assert not index.provenance.get("refused_objects")
    with pytest.raises(CheckpointFormatError, match="save large lists, texts and bytes apart"):
        index_of(saved({"data": bytes(65 << 20)}))
