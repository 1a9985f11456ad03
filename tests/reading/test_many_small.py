"""Many small tensors and values: written together, as if one by one."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import pytest
import torch

import dcp
from dcp.storage.engine.memory import gather_small, scatter_small
from dcp.storage.engine.write import DataFile
from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.plain import encode_plain
from dcp.storage.formats.torch.python_values import decode_values
from dcp.storage.stores import PosixStore
from dcp.storage.stores.posix.files import PageCacheFile
from dcp.storage.tensors import LocalMemory, byte_pieces


@pytest.mark.parametrize("torch_compatible", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (16, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_records_are_those_of_single_tensors(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], torch_compatible: bool
) -> None:
    """Tensors of one kind that go in together give the bytes and places of those that go in by turns."""
    tensors = [torch.full(shape, number % 2, dtype=getattr(torch, dtype)) for number in range(20)]
    code, size = dtypes.BY_NAME[dtype].code, tensors[0].nbytes
    store = PosixStore(tmp_path)
    single, joint = (
        DataFile(store, name, durable=False, torch_compatible=torch_compatible)
        for name in ("single", "joint")
    )
    for file in (single, joint):
        file.blob(b"before")
    for tensor in tensors:
        single.tensor(code, shape, size, byte_pieces(tensor))
    payloads = torch.stack([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8).numpy()
    joint.alike(code, shape, payloads.reshape(20, size))
    assert single.finish() == joint.finish()
    assert (tmp_path / "single").read_bytes() == (tmp_path / "joint").read_bytes()
    assert dataclasses.asdict(single.rows) == dataclasses.asdict(joint.rows)


@pytest.mark.parametrize("size", [0, 1, 8, 32, 33])
def test_small_memories_are_gathered(size: int) -> None:
    """Each from its own address, whatever lies between them, and however often."""
    owners = [np.full(40, number, np.uint8) for number in range(50)]
    addresses = np.array([owner.ctypes.data for owner in owners] * 2, np.int64)
    rows = gather_small(addresses, size)
    assert rows.tolist() == [[number] * size for number in [*range(50)] * 2]


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[:, :1], lambda t: t.conj(), lambda t: t.imag])
def test_what_is_not_all_of_its_memory_is_not_plain(make: Callable[[torch.Tensor], Any]) -> None:
    """Transposed, cut, conjugated and negated views are copied by torch."""
    whole = torch.ones(2, 2, dtype=torch.complex64)
    view = make(whole.conj() if make(whole).dtype != whole.dtype else whole)
    assert LocalMemory.of([whole, view]).is_plain.tolist() == [True, False]


def test_many_small_ones_take_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of numbers and 0-d tensors are handed to the file some hundreds at a time."""
    calls = 0
    write = PageCacheFile.write

    def counted(self: PageCacheFile, data: Any) -> None:
        nonlocal calls
        calls += 1
        write(self, data)

    monkeypatch.setattr(PageCacheFile, "write", counted)
    state = {f"count.{row}": row - 7 for row in range(3000)}
    tensors = {f"step.{row}": torch.tensor(float(row)) for row in range(3000)}
    writer = dcp.FileSystemWriter(tmp_path, sync_files=False)
    dcp.save({**state, **tensors}, storage_writer=writer, no_dist=True)
    assert calls < 60
    wanted: dict[str, Any] = {**dict.fromkeys(state, 0), **{name: torch.zeros(()) for name in tensors}}
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    assert all(wanted[name] == value for name, value in state.items())
    assert all(torch.equal(wanted[name], value) for name, value in tensors.items())


def test_odd_ones_among_small_tensors(tmp_path: Path) -> None:
    """Views that are lazily negated or conjugated, or lie across memory, are stored as what they show."""
    tensors = [torch.full((4, 4), complex(row, row)) + torch.eye(4) * row for row in range(40)]
    tensors[17] = tensors[17].t()
    tensors[20] = tensors[20].conj()
    tensors[23] = tensors[23][:, ::2].repeat(1, 2)
    state = {f"w.{row}": tensor for row, tensor in enumerate(tensors)}
    state |= {f"i.{row}": tensor.imag for row, tensor in enumerate(tensors)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    wanted = {name: torch.zeros(4, 4, dtype=tensor.dtype) for name, tensor in state.items()}
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in state.items())


def _calls(function: Callable[[], object]) -> int:
    """Calls of Python functions and steps of generators in this thread while ``function`` runs."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("value", [7, torch.tensor(7.0)], ids=["ints", "tensors"])
def test_loads_of_many_small_ones_make_few_calls_for_each(tmp_path: Path, value: Any) -> None:
    """What a value of the top level costs is steps of loops, not calls of functions."""
    state = {f"entry.{row}": value + row for row in range(3000)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    wanted = {name: number - value for name, number in state.items()}
    dcp.load(dict(wanted), checkpoint_id=tmp_path, no_dist=True)  # what is imported or cached once
    assert _calls(lambda: dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)) < 3 * len(state)
    assert wanted == state


def test_many_values_are_decoded_as_one_by_one() -> None:
    """Numbers among other values; bytes that no encoder writes are refused there, too."""
    values = [None, True, -3, 1 << 40, 1 << 90, 0.5, 2j, "a", b"b", [1, (2, {"c": 3})], ()]
    encoded = [data for value in values if (data := encode_plain(value)) is not None]
    assert decode_values(encoded) == values
    assert list(map(type, decode_values(encoded))) == list(map(type, values))
    for bad in (b"", b"\xcd\x01", b"\x01\x02", b"\xc1\x80", b"\xc4\x05a"):
        with pytest.raises(CheckpointFormatError):
            decode_values([b"\x01", bad])


@pytest.mark.parametrize("size", [0, 1, 8, 32, 33])
def test_small_memories_are_filled(size: int) -> None:
    """Each at its own address, and nothing beside them is touched."""
    owners = [np.zeros(40, np.uint8) for _ in range(50)]
    addresses = np.array([owner.ctypes.data + 3 for owner in owners], np.int64)
    rows = np.repeat(np.arange(1, 51, dtype=np.uint8)[:, None], size, axis=1)
    scatter_small(addresses, rows)
    assert [owner.tolist() for owner in owners] == [
        [0] * 3 + [number] * size + [0] * (37 - size) for number in range(1, 51)
    ]


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_small_tensors_of_several_sizes_are_loaded_and_checked(
    tmp_path: Path, verify: Literal["blocks", "none"]
) -> None:
    """Those of one size together, others alone; a damaged one is named, whichever way it is read."""
    sizes = [1, 2, 3, 8, 9, 20, 100] * 20 + [5]
    state = {f"t{row}": torch.full((size,), row + 0.5) for row, size in enumerate(sizes)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    wanted = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True, verify=verify)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in state.items())
    file = next(tmp_path.glob("*.distcp"))
    for row in (1, 6, len(sizes) - 1):
        data = bytearray(file.read_bytes())
        at = data.index(state[f"t{row}"].numpy().tobytes())
        data[at] ^= 1
        file.write_bytes(data)
        if verify == "blocks":
            with pytest.raises(dcp.CorruptCheckpointError, match=f"'t{row}'"):
                dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
        data[at] ^= 1
        file.write_bytes(data)


def test_values_go_to_their_places_in_any_dict(tmp_path: Path) -> None:
    """Flat dicts are filled at once; one that only looks flat, and values of other classes, one by one."""
    states: list[Any] = [
        {"a": 1, "b": 2.5, "c": "x"},
        {"a.b": {}, "a": {"b": 1}},
        {0: 1, "x": None},
        {"a": 1, "b": (1, 2), "c": [1, {"d": 2}]},
    ]
    for row, state in enumerate(states):
        dcp.save(state, checkpoint_id=tmp_path / str(row), no_dist=True)
        wanted = copy.deepcopy(state)
        for key, value in wanted.items():
            wanted[key] = type(value)() if type(value) in (int, float, str) else value
        dcp.load(wanted, checkpoint_id=tmp_path / str(row), no_dist=True)
        assert wanted == state
        assert list(map(type, wanted.values())) == list(map(type, state.values()))
