"""Files of torch.save: values equal to torch.load's; an unsupported value affects only its own entry."""

from __future__ import annotations

import io
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
import torch

import dcp
from dcp.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from tests.support.torch_files import assert_same


def _model_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


BASE = torch.arange(120.0)
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
        "b": b"\0\xff",
        "c": 1 + 2j,
    },
    "odd names": {"a/b\\c": torch.ones(1), "ü\ud800": torch.ones(2), "": torch.ones(3), "..": torch.ones(1)},
    "float keys": {"m": {1.5: torch.ones(1), None: 2, True: 3, (1, "x"): 4}},
    "shapes": {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "long": torch.zeros([1] * 20)},
    "states": _model_state(),
    "views": {
        "transposed": BASE.view(10, 12).t(),
        "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "every other": BASE[::2],
        "windows": BASE.unfold(0, 7, 3),
        "tied": BASE.view(10, 12).t(),
    },
    "bits": {
        str(dtype): torch.arange(16, dtype=torch.uint8).view(dtype)
        for dtype in (
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.uint16,
            torch.complex128,
            torch.int8,
            torch.float16,
        )
    },
    "large values": lambda: {"text": "x" * (17 << 20), "data": bytes(18 << 20)},
}


def written(folder: Path, value: Any, **options: Any) -> Path:
    """Write a file with torch.save, and return the path."""
    torch.save(value, folder / "m.pt", **options)
    return folder / "m.pt"


@pytest.mark.parametrize("name", CASES)
def test_structure_and_values_equal_torch_loads(tmp_path: Path, name: str) -> None:
    """Values, types, order of keys, nesting, dtypes and bits equal those of torch.load."""
    value = CASES[name]
    path = written(tmp_path, value() if callable(value) else value)
    assert_same(dcp.read(path), torch.load(path, weights_only=True))


class Custom:
    """Class outside of each allow-list."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_unreadable_entries_do_not_affect_others(tmp_path: Path) -> None:
    """Foreign classes, sparse and quantised tensors are listed with a reason; other entries can be read."""
    state = {
        "good": torch.arange(3.0),
        "custom": Custom(),
        "array": np.array([1, None]),
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "function": torch.nn.functional.relu,
        "nested": {"deep": [torch.ones(2), Custom()]},
        "also good": {"x": 5},
    }
    index = dcp.open_index(written(tmp_path, state))
    refused = index.provenance["refused_objects"]
    assert set(index.fqns) == {"good", "nested.deep.0"} and index.objects.fqns == ["also good.x"]
    assert refused.keys() == state.keys() - {"good", "nested", "also good"} | {"nested.deep.1"}
    assert refused["custom"].endswith("Custom") and refused["sparse"] == "sparse tensor"
    with pytest.raises(UnsafeObjectError, match="state_dict"):
        dcp.open_index(written(tmp_path, torch.nn.Linear(2, 2)))


class _SparseFile(io.RawIOBase):
    """File that skips large pieces, which are zeros in this test."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        """Write small pieces, and seek over large ones."""
        view = memoryview(data).cast("B")
        if len(view) > 1 << 20:
            self._file.seek(len(view), 1)
        else:
            self._file.write(view)
        return len(view)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def test_files_beyond_4_gib(tmp_path: Path) -> None:
    """Entries of more than 4 GiB in torch's zip64 files, and entries after them, are read."""
    path, large = tmp_path / "large.pt", torch.empty((1 << 32) + 100, dtype=torch.uint8)
    torch.serialization.set_crc32_options(False)  # a checksum would read four gigabytes
    try:
        file = _SparseFile(path)
        torch.save({"a": torch.arange(5.0), "large": large, "b": torch.arange(7.0)}, cast(IO[bytes], file))
        file.close()
    finally:
        torch.serialization.set_crc32_options(True)
    index = dcp.open_index(path)
    assert index.payload_offsets[index.position["b"]] > 1 << 32
    assert dcp.read(path, only="b")["b"].tolist() == list(range(7))


def test_older_formats_are_recognised(tmp_path: Path) -> None:
    """Errors name the formats before torch 1.6, bare pickles, TorchScript and big-endian files."""
    path = written(tmp_path, {"a": torch.ones(1)}, _use_new_zipfile_serialization=False)
    cases: list[tuple[bytes, type[Exception], str]] = [
        (path.read_bytes(), UnsupportedFormatError, r"before 1\.6"),
        (b"\0" * 257 + b"ustar" + b"\0" * 600, UnsupportedFormatError, "tar format"),
        (b"\x80\x04N.", UnsupportedFormatError, "plain pickle"),
        *((data, CheckpointFormatError, "not written by torch.save") for data in (b"", b"PK", b"hello")),
        (b"PK\3\4" + b"\0" * 100, CheckpointFormatError, "no zip end record: it is truncated"),
    ]
    for name, words in (("constants.pkl", "TorchScript"), ("byteorder", "big-endian")):
        packed = io.BytesIO()
        written(tmp_path, {"a": torch.ones(1)})
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
            for info in old.infolist():
                new.writestr(info.filename, b"big" if info.filename.endswith(name) else old.read(info))
            if name == "constants.pkl":
                new.writestr("m/constants.pkl", b"\x80\x02N.")
        cases.append((packed.getvalue(), UnsupportedFormatError, words))
    for data, error, words in cases:
        path.write_bytes(data)
        with pytest.raises(error, match=words):
            dcp.open_index(path)


def test_names_that_collide_are_refused(tmp_path: Path) -> None:
    """Two entries with the same flat name are refused."""
    for state in ({"a.b": 1, "a": {"b": 2}}, {"m": {1: torch.ones(1), "1": torch.ones(1)}}):
        with pytest.raises(UnsupportedFormatError, match="rename one"):
            dcp.open_index(written(tmp_path, state))


def test_a_flipped_bit_in_the_pickle_is_damage(tmp_path: Path) -> None:
    """The checksum of the pickle is verified, because shapes and strides are read from the pickle."""
    path = written(tmp_path, {"a": torch.ones(7)})
    data = bytearray(path.read_bytes())
    data[data.index(b"FloatStorage") + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"data\.pkl"):
        dcp.open_index(path)
