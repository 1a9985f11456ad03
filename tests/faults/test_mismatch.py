"""State dicts that differ from the checkpoint or between ranks: errors or reports name the entries."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.errors import (
    CheckpointError,
    DtypeMismatchError,
    MissingKeyError,
    PlanError,
    ReplicaMismatchError,
    ShapeMismatchError,
)
from tests.support.ranks import run_ranks
from tests.support.values import raw
from tests.support.versions import listing


def _stored() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.int32)},
        "step": 7,
        "names": ["a", "b"],
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Save `_stored`, and return the folder."""
    dcp.save(_stored(), checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def _wanted(**changes: Any) -> dict[str, Any]:
    model = {"w": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int32)} | changes
    return {"model": model, "step": 0, "names": []}


MISFITS: dict[str, tuple[dict[str, Any], type[CheckpointError], list[str]]] = {
    **{
        str(shape): (_wanted(w=torch.zeros(shape)), ShapeMismatchError, ["'model.w'", "(3, 4)", str(shape)])
        for shape in [(4, 3), (12,), (3, 5), (3, 4, 1), (2, 4), ()]
    },
    **{
        str(dtype): (
            _wanted(w=torch.full((3, 4), 3, dtype=dtype)),
            *(DtypeMismatchError, ["'model.w'", "float32", "cast"]),
        )
        for dtype in (torch.bfloat16, torch.int32, torch.float64)
    },
    "missing keys": (
        _wanted(extra=torch.zeros(2), more=torch.zeros(3)) | {"epoch": 3},
        *(MissingKeyError, ["model.extra", "model.more", "epoch"]),
    ),
    "a tensor for a value": (_wanted() | {"step": torch.zeros(())}, PlanError, ["'step'"]),
    "a value for a tensor": (_wanted(w="no tensor"), PlanError, ["'model.w'"]),
    "three problems": (
        _wanted(w=torch.zeros(4, 4), b=torch.zeros(5), extra=torch.zeros(1)),
        *(PlanError, ["model.w", "model.b", "model.extra"]),
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_mismatches_are_refused_by_name(checkpoint: Path, misfit: str) -> None:
    """One error names all mismatches, also shapes with as many elements, and dtypes."""
    state, kind, words = MISFITS[misfit]
    with pytest.raises(kind) as caught:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert [word for word in words if word not in str(caught.value)] == []
    assert isinstance(caught.value, KeyError) == (kind is MissingKeyError)


def test_a_partial_load_reports_missing_entries(checkpoint: Path) -> None:
    """A partial load loads the rest, and the report names missing and unexpected entries."""
    state = _wanted(extra=torch.full((2,), 9.0)) | {"epoch": 3}
    del state["names"]
    report = dcp.load(state, checkpoint_id=checkpoint, no_dist=True, allow_partial_load=True)
    assert sorted(report.missing) == ["epoch", "model.extra"]
    assert report.unexpected == ["names"]
    assert torch.equal(state["model"]["extra"], torch.full((2,), 9.0))
    assert raw(state["model"]["w"]) == raw(_stored()["model"]["w"])
    assert (state["epoch"], state["step"]) == (3, 7)


# -- between ranks ------------------------------------------------------------------------------------------


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        act()
    except CheckpointError as error:
        names = {cls.__name__ for cls in type(error).__mro__}
        return names, error.facts.get("fqns"), str(error)
    return None


A_TENSOR, A_DICT = [torch.ones(2)], {"x": 1}
DIFFERENCES: dict[str, tuple[str, list[str], Callable[[bool], dict[str, Any]]]] = {
    "tensor": ("ReplicaMismatchError", ["w"], lambda odd: {"w": torch.tensor([[0.0, float(odd)]])}),
    "sign of zero": (
        *("ReplicaMismatchError", ["same"]),
        lambda odd: {"same": torch.tensor([0.0, -0.0 if odd else 0.0])},
    ),
    "value": ("ReplicaMismatchError", ["lr"], lambda odd: {"lr": 0.25 if odd else 0.5}),
    "type of a value": ("ReplicaMismatchError", ["lr"], lambda odd: {"lr": 1 if odd else True}),
    "shape": ("PlanError", ["same"], lambda odd: {"same": torch.ones(5 if odd else 4)}),
    "dtype": (
        *("PlanError", ["same"]),
        lambda odd: {"same": torch.ones(4, dtype=torch.float64 if odd else torch.float32)},
    ),
    "tensor and value": ("PlanError", ["lr"], lambda odd: {"lr": torch.ones(1) if odd else 0.5}),
    "generators and arrays": (
        *("ReplicaMismatchError", ["generator", "masked", "objects", "random", "rng", "sparse"]),
        lambda odd: {
            "rng": np.random.RandomState(odd).get_state(),
            "generator": np.random.default_rng(int(odd)),
            "random": random.Random(int(odd)),
            "masked": np.ma.masked_array([1, 2], [False, odd]),
            "objects": np.array([None, {"a": odd}], object),
            "sparse": (torch.eye(2).to_sparse() * (1 + odd),),
        },
    ),
    "no state to compare": ("ReplicaMismatchError", ["lock"], lambda odd: {"lock": threading.Lock()}),
    "nested": (
        *("PlanError", ["list", "dict", "none", "deep.a", "tensor"]),
        lambda odd: {
            "list": [] if odd else A_TENSOR,
            "dict": {} if odd else 5,
            "none": None if odd else A_DICT,
            "deep": {"a": [1]} if odd else {"a": [1, A_TENSOR]},
            "tensor": torch.ones(2) if odd else A_TENSOR,
            "fits": {} if odd else A_DICT,
        },
    ),
}
"""State that differs on rank 1 of 3: class of the error, names in its message, and the state of a rank."""


def _save_differing(rank: int, world_size: int, root: Path) -> Any:
    results: dict[str, Any] = {}
    for number, (kind, (_, _, state_of)) in enumerate(DIFFERENCES.items()):
        state, folder = (
            {"same": torch.ones(4), "model": {"w": torch.zeros(9)}, **state_of(rank == 1)},
            root / str(number),
        )
        raised = _outcome(partial(dcp.save, state, checkpoint_id=folder))
        dist.barrier()
        results[kind] = raised, listing(folder)
    return results


def test_differing_replicas_are_refused_on_every_rank(tmp_path: Path) -> None:
    """All ranks raise an error with the entry and the rank of each value: one value would be lost."""
    for results in run_ranks(3, _save_differing, tmp_path):
        for kind, (class_name, wrong, _) in DIFFERENCES.items():
            (names, fqns, text), left = results[kind]
            assert {class_name, "RankFailedError"} <= names and left == {}, (kind, text)
            assert all(f"'{fqn}'" in text for fqn in wrong) and "'fits'" not in text, (kind, text)
            if class_name == ReplicaMismatchError.__name__:
                assert fqns == wrong and "PerRank" in text
                assert "rank 1" in text or "ranks 0, 1, 2 cannot" in text


def save_with_a_difference_between_samples(rank: int, world_size: int, root: Path) -> Any:
    """Save a large tensor with one different element, with each ``replica_check``; return the errors."""
    state = {"w": torch.zeros(1 << 20)}
    state["w"][123_457] = float(rank)
    planners = [None, *[dcp.DefaultSavePlanner(replica_check=check) for check in ("sampled", "off")]]
    return [
        _outcome(partial(dcp.save, state, checkpoint_id=root / str(number), planner=planner))
        for number, planner in enumerate(planners)
    ]


def test_all_bytes_of_replicas_are_compared(tmp_path: Path) -> None:
    """The default compares all bytes. ``replica_check="sampled"`` misses one element of a million; "off"
    stores one of the replicas, as stock torch does."""
    for default, sampled, off in run_ranks(2, save_with_a_difference_between_samples, tmp_path):
        assert "ReplicaMismatchError" in default[0]
        assert default[1] == ["w"]
        assert sampled is None
        assert off is None
