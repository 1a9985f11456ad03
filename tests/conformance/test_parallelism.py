"""`dcp.testing.parallelism`: finds public bugs by name, rank and position, and none in dcp."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import OptionError
from dcp.testing.parallelism import Finding, Report, check
from tests.conformance import faulty_pairs as faulty
from tests.conformance import parallel_builds as builds
from tests.support.forking import forkserver_context
from tests.support.programs import run_program

_nameless = lambda rank, world: builds.ddp(rank, world)  # noqa: E731


def _tried(build: Any, save: Any = dcp.save, load: Any = dcp.load, **options: Any) -> Report:
    return check(build, save, load, context=forkserver_context(), **options)


def _findings(report: Report, saved_by: int, loaded_by: int) -> list[Finding]:
    found = {(trial.saved_by, trial.loaded_by): trial.findings for trial in report.trials}
    return list(found[saved_by, loaded_by])


# -- public bugs ---------------------------------------------------------------------------------------------


def test_experts_numbered_by_rank_are_reported() -> None:
    """KempnerForge#202: each rank numbers its experts from 0, so one rank's experts are saved for all. With
    part_of= the lost experts are named, without it the rank of origin."""
    report = _tried(builds.experts_renumbered, stock.save, stock.load, worlds=(2, 1))
    same = _findings(report, 2, 2)
    names = {f"experts.{n}.{which}" for n in range(3) for which in ("weight", "bias")}
    assert {(found.kind, found.name, found.places) for found in same} == {
        ("mixed up", name, "all") for name in names
    }
    assert len(same) == len(names)  # for each name one of both ranks has its own expert
    assert all(found.from_rank == 1 - found.rank for found in same if found.rank is not None)
    (failed,) = _findings(report, 2, 1)
    assert failed.kind == "failed" and "experts.3" in failed.found
    report = _tried(
        builds.experts_renumbered, stock.save, stock.load, worlds=(2,), part_of=builds.expert_of_rank
    )
    pairs = {(found.name, found.from_name) for found in report.findings}
    assert len(pairs) == len(names) == len(report.findings)
    for name in names:
        other = name.replace(name.split(".")[1], str(int(name.split(".")[1]) + 3))
        assert (name, other) in pairs or (other, name) in pairs


def test_strided_shards_joined_as_plain_are_reported() -> None:
    """pytorch#129206: strided shards are joined as plain shards; all elements are present at wrong places."""
    report = _tried(
        builds.fsdp2_tensor_parallel, faulty.save_full_in_order_of_the_mesh, faulty.load_full, worlds=(4, 1)
    )
    found = [found for found in _findings(report, 4, 1) if found.part == "model"]
    assert {(one.kind, one.name) for one in found} == {
        ("shuffled", "first.weight"),
        ("shuffled", "first.bias"),
    }
    weight = next(one for one in found if one.name == "first.weight")
    assert (weight.places, weight.from_places) == ("[3:9]", "[6:9, 3:6]")


@cache
def fused_by_rank() -> Report:
    """Return the report of Megatron-LM#4841, which two tests use."""
    return _tried(
        builds.gate_up_by_hand,
        faulty.save_by_blocks,
        faulty.load_fused,
        worlds=(2, 1),
        part_of=builds.fused_of_rank,
    )


def test_fused_projections_joined_by_rank_are_reported() -> None:
    """Megatron-LM#4841: no finding on as many ranks; on others gate and up projections are mixed."""
    report = fused_by_rank()
    assert not _findings(report, 2, 2)
    (found,) = _findings(report, 2, 1)
    assert (found.kind, found.name, found.places) == ("shuffled", "gate_up", "[6:18]")
    assert found.from_places == "[12:18, 6:12]"


def test_a_skipped_optimizer_is_reported() -> None:
    """All optimizer entries are findings, moments and learning rate, if the load skips them."""
    report = _tried(builds.tied, faulty.save_weights_alone, faulty.load_weights_alone, worlds=(1,))
    assert {(found.kind, found.part, found.name) for found in report.findings} == {
        ("lost", "optimizer", name)
        for name in ("embed.weight.exp_avg", "embed.weight.exp_avg_sq", "embed.weight.step", "lr")
    }


def test_an_async_save_without_a_copy_is_reported() -> None:
    """Values from after the save in the checkpoint are reported as stale."""
    report = _tried(builds.tied, faulty.save_later_without_a_copy, faulty.load_weights_alone, worlds=(1,))
    (weight,) = [found for found in report.findings if found.part == "model"]
    after = "the values of training after the save"
    assert (weight.kind, weight.name, weight.found) == ("stale", "embed.weight", after)


# -- this package --------------------------------------------------------------------------------------------

_WORLDS: dict[Any, tuple[int, ...]] = {
    builds.fsdp1_flat: (3, 2, 1),
    builds.fsdp2: (2, 1, 3),
    builds.fsdp2_tensor_parallel: (4, 2, 1),
    builds.ddp: (2, 1),
    builds.pipeline: (2, 1, 3),
    builds.experts_by_number: (3, 1, 2),
    builds.tied: (1, 2),
}
_USUAL = (builds.fsdp2_tensor_parallel, builds.experts_by_number)


@pytest.mark.parametrize(
    "build",
    [pytest.param(b, marks=() if b in _USUAL else pytest.mark.exhaustive, id=b.__name__) for b in _WORLDS],
)
def test_dcp_keeps_every_element(build: Any) -> None:
    """Each parallelism, saved on some ranks and loaded on others, has no finding."""
    report = _tried(build, worlds=_WORLDS[build])
    assert report.ok, report
    assert all(trial.tensors > 3 * trial.loaded_by for trial in report.trials)


def test_dcp_refuses_experts_numbered_by_rank() -> None:
    """dcp raises an error, where stock torch silently drops one rank's experts."""
    report = _tried(builds.experts_renumbered, worlds=(2,))
    assert {found.kind for found in report.findings} == {"failed"}
    assert "ReplicaMismatchError" in str(report) and "experts.0" in str(report)


# -- ranks that fail -----------------------------------------------------------------------------------------


def test_a_rank_killed_in_a_save_is_reported() -> None:
    """The killed rank is reported with its exit code, and the waiting rank is ended."""
    report = _tried(builds.ddp, faulty.save_and_die, dcp.load, worlds=(2, 1))
    assert [(found.kind, found.rank) for found in report.findings] == [("failed", 0), ("failed", 1)]
    assert "exit code -9" in report.findings[1].found


def test_invalid_arguments_are_refused() -> None:
    """Functions that cannot be sent to a process, invalid worlds, and globs without a match are errors."""
    with pytest.raises(OptionError, match="importable by name"):
        _tried(lambda rank, world: builds.ddp(rank, world))
    with pytest.raises(OptionError, match="importable by name"):
        _tried(_nameless)
    for worlds in ((), (0,), 2, "2"):
        with pytest.raises(OptionError, match="worlds"):
            _tried(builds.ddp, worlds=worlds)
    for options in ({"only": "*.lora_*"}, {"own": ["*", "*.experts.*"]}, {"replicas": "*.experts.*"}):
        with pytest.raises(OptionError, match=r"'\*\.[a-z_]+\*?[.a-z*]*' match no parameter or buffer"):
            _tried(builds.tied, worlds=(1,), **options)


_TRAINER = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_model():
    model = torch.nn.Linear(6, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters())
"""


@pytest.mark.exhaustive
def test_the_docs_example_passes(tmp_path: Path) -> None:
    """The example of the page passes in a user's folder, with default processes."""
    root = Path(__file__).parents[2]
    (block,) = re.findall(
        r"^```python\n(.*?)^```",
        (root / "docs/how-to/test-your-parallelism.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (tmp_path / "my_trainer.py").write_text(_TRAINER)
    (tmp_path / "test_checkpoints.py").write_text(block)
    done = run_program("-m", "pytest", "-q", "test_checkpoints.py", cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


# -- reports -------------------------------------------------------------------------------------------------


def test_a_report_is_a_table_and_data() -> None:
    """The report has tensor, rank, position and value found, and explains each word used."""
    report = fused_by_rank()
    lines = str(report).splitlines()
    assert lines[0] == "saved by 2 ranks, loaded by 2: 2 tensors, all restored"
    assert lines[1] == "saved by 2 ranks, loaded by 1: 1 tensors, 1 finding"
    assert "shuffled  model  gate_up  rank 0  60 of 120  [6:18]  has [12:18, 6:12] of itself" in lines[2]
    assert lines[-1] == "shuffled: elements of the same tensor in another order"
    data = json.loads(json.dumps(report.to_json()))
    assert data["ok"] is False
    assert data["trials"][1]["findings"][0]["from_places"] == "[12:18, 6:12]"
