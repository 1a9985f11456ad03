"""Megatron-Core's checkpoint strategies by dcp: killed in a save, resumed on other sizes. Tested with a
stand-in, and the real package if installed (`make test-trainer TRAINER=megatron`)."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from tests.support.batches import losses
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.megatron_interface import PACKAGE, Interface, install

INTERFACES: list[Interface] = ["stand-in", "installed"] if find_spec("megatron") else ["stand-in"]
STEPS = 14


def _trained(jobs: list[tuple[Path, int, dict[str, Any]]]) -> list[list[Ending]]:
    """Run trainings one after the other, each on its number of ranks."""
    from tests.support.megatron_training import training

    install(jobs[0][2]["interface"])
    return [run_groups([Group(ranks, training, (folder, options))])[0] for folder, ranks, options in jobs]


def _run(*jobs: tuple[Path, int, dict[str, Any]]) -> list[list[Ending]]:
    endings = in_lab(_trained, list(jobs))
    assert isinstance(endings, list)
    return endings


def _values(endings: list[Ending]) -> list[Any]:
    assert all(ending.value is not None for ending in endings), endings
    return [ending.value for ending in endings]


@pytest.mark.parametrize(
    ("interface", "mode", "pp"),
    [
        (interface, mode, pp)
        if (interface, mode, pp) == ("stand-in", "thread", 1)
        else pytest.param(interface, mode, pp, marks=pytest.mark.exhaustive)
        for interface in INTERFACES
        for mode, pp in (("sync", 1), ("thread", 1), ("process", 1), ("thread", 2))
    ],
)
def test_a_run_killed_in_a_save_resumes_exactly(tmp_path: Path, interface: str, mode: str, pp: int) -> None:
    """With tensor parallelism, with or without pipeline stages, each loss equals an uninterrupted run's."""
    options = {"interface": interface, "mode": mode, "tp": 2, "pp": pp, "steps": STEPS}
    whole, killed, ranks = tmp_path / "whole", tmp_path / "killed", 2 * pp
    finished, died, resumed = _run(
        (whole, ranks, options), (killed, ranks, options | {"die_at": 3}), (killed, ranks, options)
    )
    assert died[0].killed, died
    assert [value["sum"] for value in _values(resumed)] == [value["sum"] for value in _values(finished)]
    assert resumed[0].value["common"] == {"tp": 2, "pp": pp, "iteration": 6}
    for rank in range(ranks):
        assert losses(killed, rank) == losses(whole, rank)


@pytest.mark.exhaustive
@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(("tp", "pp", "replicas"), [(1, 1, 1), (1, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2)])
def test_weights_load_on_other_sizes(tmp_path: Path, interface: str, tp: int, pp: int, replicas: int) -> None:
    """Weights saved with tensor and pipeline parallel 2 load on other sizes bit for bit; training
    continues."""
    saved, loaded, continued = _run(
        (tmp_path, 4, {"interface": interface, "tp": 2, "pp": 2, "steps": 6}),
        *[
            (
                tmp_path,
                tp * pp * replicas,
                {"interface": interface, "tp": tp, "pp": pp, "steps": steps, "rng": False},
            )
            for steps in (6, 8)
        ],
    )
    stored = dcp.read(tmp_path / "iter_0000006", weights_only=False)
    assert stored["common_state/shard_0_1"][0]["args"] == Namespace(tp=2, pp=2)
    weights = [stored["decoder.weight"], *(stored[f"decoder.layers.{layer}.bias"] for layer in range(4))]
    total = sum(float(each.double().sum()) for each in weights)
    sums = [value["sum"] for value in _values(loaded)]
    replicated = sum(float(each.double().sum()) for each in weights[1:]) * (tp - 1)
    assert sum(sums) == pytest.approx((total + replicated) * replicas, rel=1e-12)
    assert {value["common"]["iteration"] for value in _values(continued)} == {6}
    assert [value["sum"] for value in _values(saved)] != sums


def _in_package(interface: Interface, function: Any, *args: Any) -> Any:
    """Call ``function`` with Megatron's package and dcp's plug-in, on the only rank of a group."""
    return in_lab(_alone, interface, function, args)


def _alone(interface: Interface, function: Any, args: tuple[Any, ...]) -> Any:
    install(interface)
    (ending,) = run_groups([Group(1, _called, (function, args))])[0]
    assert ending.raised is None, ending.raised
    return ending.value


def _called(rank: int, ranks: int, function: Any, args: tuple[Any, ...]) -> Any:
    return function(import_module(PACKAGE), import_module("dcp.integrations.megatron"), *args)


def _raised(function: Any, *args: Any) -> tuple[str, str]:
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 - returned to the test
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "", ""


def _other_shapes(package: Any, plugin: Any, folder: Path) -> dict[str, Any]:
    make, save, load = (
        package.ShardedTensor.from_rank_offsets,
        plugin.DcpSaveStrategy(),
        plugin.DcpLoadStrategy(),
    )
    given = {"w": make("w", torch.arange(12.0).view(6, 2)), "n": 1}
    folder.mkdir()
    package.save(given, str(folder), save)
    found: dict[str, Any] = {}
    for rows in (4, 8):
        state = {"w": make("w", torch.full((rows, 2), 7.0), allow_shape_mismatch=True)}
        found[f"rows {rows}"] = package.load(state, str(folder), load)["w"].tolist()
    halves = [make("w", torch.ones(4, 2), (0, n, 2), allow_shape_mismatch=True) for n in range(2)]
    found["halves"] = torch.cat(package.load({"w": halves}, str(folder), load)["w"]).tolist()
    new = make("w", torch.zeros(6, 2))
    new.data = None
    found["new"] = package.load({"w": new}, str(folder), load)["w"].sum().item()
    for name, wanted, options in (
        ("shape", make("w", torch.ones(8, 2)), {}),
        ("dtype", make("w", torch.ones(6, 2, dtype=torch.float64)), {}),
        ("cast", make("w", torch.ones(6, 2, dtype=torch.float64)), {"dtype": "cast"}),
        ("missing", make("v", torch.ones(6, 2)), {}),
    ):
        strategy = plugin.DcpLoadStrategy(**options)
        found[name] = _raised(package.load, {"w": wanted}, str(folder), strategy)[0]
    return found


@pytest.mark.parametrize("interface", INTERFACES)
def test_other_shapes_and_dtypes_need_permission(tmp_path: Path, interface: Interface) -> None:
    """A tensor with allow_shape_mismatch, as a padded vocabulary has, is zero in rows not stored."""
    rows = torch.arange(12.0).view(6, 2).tolist()
    assert _in_package(interface, _other_shapes, tmp_path / "iter_1") == {
        "rows 4": rows[:4],
        "rows 8": [*rows, [0.0, 0.0], [0.0, 0.0]],
        "halves": [*rows, [0.0, 0.0], [0.0, 0.0]],
        "new": 66.0,
        "shape": "ShapeMismatchError",
        "dtype": "DtypeMismatchError",
        "cast": "",
        "missing": "MissingKeyError",
    }
