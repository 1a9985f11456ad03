"""Experts on several ranks that are one tensor in the checkpoint: each rank writes and reads its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import PlanError
from tests.save_load.code_paths import error_of
from tests.save_load.test_load_mapped import assert_equal, numbered
from tests.support.ranks import run_ranks

EXPERTS, HIDDEN, WIDTH = 6, 8, 4
STACKED = "layers.0.moe.routed_experts.inner_experts"


def hf_weights() -> dict[str, torch.Tensor]:
    """Return weights under transformers' names, with separate experts."""
    found = {"model.norm.weight": numbered(WIDTH)}
    for expert in range(EXPERTS):
        for number, part in enumerate(("gate_proj", "up_proj")):
            first = 1000 * (2 * expert + number)
            name = f"model.layers.0.mlp.experts.{expert}.{part}.weight"
            found[name] = numbered(HIDDEN, WIDTH, first=first)
    return found


def stacked() -> dict[str, torch.Tensor]:
    """Return the same weights under torchtitan's names, with stacked experts."""
    own = hf_weights()
    made = {
        f"{STACKED}.{name}": torch.stack(
            [own[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] for expert in range(EXPERTS)]
        )
        for name, part in (("w1_EFD", "gate_proj"), ("w3_EFD", "up_proj"))
    }
    return made | {"norm.weight": own["model.norm.weight"]}


def part_of(rank: int, groups: int, without: int | None = None) -> dict[str, torch.Tensor]:
    """Return a rank's weights: every ``groups``-th expert, and all other weights."""
    return {
        name: tensor
        for name, tensor in hf_weights().items()
        if "experts" not in name
        or (int(name.split(".")[5]) % groups == rank % groups and f"experts.{without}." not in name)
    }


def save_own_experts(rank: int, world_size: int, path: str, groups: int, how: str) -> None:
    """Save with a map that stacks the experts, synchronously or not, and prove it."""
    weights = dcp.weight_map("qwen3:hf-to-titan", num_experts=EXPERTS)
    own = part_of(rank, groups)
    if how == "save":
        dcp.save(own, checkpoint_id=path, map=weights)
    else:
        dcp.async_save(own, checkpoint_id=path, map=weights).result()
    proof = dcp.prove(own, path, map=weights)
    assert proof.ok, proof.findings
    lacking = dcp.prove(part_of(rank, groups, without=3), path, map=weights)
    assert {found.kind for found in lacking.findings} == {"incomplete"}


def load_own_experts(rank: int, world_size: int, path: str, groups: int) -> None:
    """Load with a map that unstacks the experts, and check that only this rank's experts are read."""
    own = {name: torch.zeros_like(tensor) for name, tensor in part_of(rank, groups).items()}
    weights = dcp.weight_map("qwen3:hf-to-titan", num_experts=EXPERTS, inverse=True)
    report = dcp.load(own, checkpoint_id=path, map=weights)
    assert_equal(own, part_of(rank, groups))
    assert report.bytes_needed == sum(tensor.nbytes for tensor in own.values())


@pytest.mark.parametrize(
    ("ranks", "groups", "how"),
    [
        (2, 2, "save"),
        pytest.param(2, 2, "async", marks=pytest.mark.exhaustive),
        pytest.param(4, 4, "save", marks=pytest.mark.exhaustive),
        pytest.param(4, 2, "save", marks=pytest.mark.exhaustive),
    ],
)
def test_each_rank_writes_and_loads_its_experts(tmp_path: Path, ranks: int, groups: int, how: str) -> None:
    """Each expert is written by its rank, replicas once, and proved; ranks with other experts load them."""
    run_ranks(ranks, save_own_experts, str(tmp_path), groups, how)
    assert_equal(dcp.read(tmp_path), stacked())
    assert dcp.read(tmp_path).keys() == stacked().keys()
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert stored < sum(tensor.nbytes for tensor in stacked().values()) + (8 << 10)
    for groups in (ranks, 1):
        run_ranks(ranks, load_own_experts, str(tmp_path), groups)


def save_wrong(rank: int, world_size: int, path: str) -> list[str]:
    """Save without expert 3, for several known numbers of experts, and save with another shape on rank 1."""
    own = part_of(rank, world_size, without=3)
    wide = {
        name: torch.zeros(HIDDEN, WIDTH + rank) if "experts" in name else tensor
        for name, tensor in part_of(rank, world_size).items()
    }
    configs: list[Any] = [{"num_experts": EXPERTS}, {"num_experts": 2}, {}]
    saves = [(own, config) for config in configs] + [(wide, configs[0])]
    maps = [dcp.weight_map("qwen3:hf-to-titan", config) for _, config in saves]
    return [
        error_of(partial(dcp.save, state, checkpoint_id=path, map=weights))
        for (state, _), weights in zip(saves, maps, strict=True)
    ]


def test_missing_and_differing_experts_are_errors(tmp_path: Path) -> None:
    """Missing experts, an unknown number of them, and differing shapes are errors before any write."""
    gone = [f"'model.layers.0.mlp.experts.3.{part}.weight'" for part in ("gate_proj", "up_proj")]
    for missing, more, unknown, wide in run_ranks(2, save_wrong, str(tmp_path / "c")):
        assert f"PlanError: all ranks together lack tensors, or parts of them: {', '.join(gone)}: " in missing
        assert "{expert} is 5 in a source tensor" in more
        assert "the number of expert (num_experts or num_local_experts) is not" in unknown
        assert "float32 [6, 8, 4] on rank 0, but float32 [6, 8, 5] on rank 1" in wide
        assert "all ranks together" not in wide
    with pytest.raises(PlanError, match="expert 3 is missing"):
        weights = dcp.weight_map("qwen3:hf-to-titan", num_experts=EXPERTS)
        dcp.save(part_of(0, 1, without=3), checkpoint_id=tmp_path / "c", map=weights, no_dist=True)
    assert not (tmp_path / "c").exists()
