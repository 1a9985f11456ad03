"""Many small tensors and values: grouped writes and reads give the same result as single ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import dcp
from dcp.storage.stores import PosixStore
from tests.support.faulty_store import FaultInjectingStore


def test_many_small_tensors_take_few_writes(tmp_path: Path) -> None:
    """Thousands of numbers and 0-d tensors are written some hundreds at a time."""
    store = FaultInjectingStore(PosixStore(tmp_path))
    state: dict[str, Any] = {f"count.{row}": row - 7 for row in range(3000)}
    state |= {f"step.{row}": torch.tensor(float(row)) for row in range(3000)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter("x", open_store=lambda _: store), no_dist=True)
    assert store.counts["write"] < 60
    assert dcp.read(tmp_path) == state


def test_small_views_keep_their_values(tmp_path: Path) -> None:
    """Negated, conjugated and strided views are stored with the values that they show."""
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


def test_values_fill_any_dict(tmp_path: Path) -> None:
    """Flat dicts are filled at once; dicts with dotted or non-string keys, and nested values, one by one."""
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
