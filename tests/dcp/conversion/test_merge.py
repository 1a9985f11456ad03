"""Merges: sums to the last bit, of any formats; what cannot be is named before anything is written."""

from __future__ import annotations

import json
import random
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import dcp
from dcp.cli.app import app
from dcp.conversion.contents.casting import narrowed
from dcp.conversion.copying import sums, tasks
from dcp.conversion.merging.arithmetic import (
    average_weights,
    formula_weights,
    weights_of_adapters,
    weights_of_sources,
)
from dcp.demo.s3_server import S3Server
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeyError,
    OptionError,
    PlanError,
)
from dcp.storage.formats import dtypes
from tests.support.programs import run_program
from tests.support.s3 import raw_s3

State = dict[str, torch.Tensor]

_KINDS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
_NAMES = {"dcp": "out", "safetensors": "out.safetensors", "torch": "out.pt"}


def added(tensors: list[torch.Tensor], weights: list[float], kind: str, accumulate: str) -> torch.Tensor:
    """What a merge promises, by numpy on whole tensors: products and sums in the order of the sources, each
    rounded in the type in which is added; then rounded once."""
    number = np.dtype(accumulate)
    total = None
    for tensor, weight in zip(tensors, weights, strict=True):
        with np.errstate(all="ignore"):
            term = tensor.to(torch.float64).numpy().astype(number) * number.type(weight)
            total = term if total is None else total + term
    assert total is not None
    code = dtypes.BY_NAME[kind].code
    data = narrowed(np.ascontiguousarray(total).reshape(-1), code)  # tried against torch in test_casting
    made = torch.empty(tensors[0].shape, dtype=getattr(torch, kind))
    if data.size:
        made.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    return made


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other) if tensor.numel()]
    return not raw or torch.equal(*raw)


def write(state: State, path: Path, draw: random.Random) -> Path:
    """In any format: one file, or a folder of one chunk a tensor or several."""
    way = draw.choice(["torch", "safetensors", "dcp", "split"])
    if way == "torch":
        torch.save(state, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    if way == "safetensors":
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()}, path.with_suffix(".safetensors")
        )
        return path.with_suffix(".safetensors")
    if way == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return path
    torch.save(state, path.with_suffix(".part.pt"))
    dcp.convert(path.with_suffix(".part.pt"), path, to="dcp", files=draw.randint(2, 4), chunks="split")
    return path


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 60))]
)
def test_sums_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Any dtypes, weights, shapes, formats and shardings; windows, steps and blocks that end anywhere."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(1, 5)
    shapes = {
        name: [draw.randint(0 if name == "z" else 1, 9) for _ in range(draw.randint(0, 3))] for name in "xyz"
    }
    shapes["large"] = [37, 53]  # of several blocks of a DCP file that is split
    kinds = {name: [draw.choice(_KINDS) for _ in range(count)] for name in shapes}
    states = [
        {name: torch.randn(shape).to(getattr(torch, kinds[name][n])) for name, shape in shapes.items()}
        for n in range(count)
    ]
    for number, state in enumerate(states):
        state["steps"] = torch.arange(3) + number
        if draw.random() < 0.5:  # stored the other way round
            state["large"] = state["large"].T.contiguous().T
    sources = [write(state, tmp_path / f"in{n}", draw) for n, state in enumerate(states)]
    weights = [draw.choice([0.5, 0.1, -1.5, 1.0, 1e-3, draw.uniform(-2, 2)]) for _ in range(count)]
    monkeypatch.setattr(tasks, "WINDOW_BYTES", draw.choice([61, 400, 5000]))
    monkeypatch.setattr(sums, "_STEP_BYTES", draw.choice([50, 300, 5000]))
    monkeypatch.setattr(sums, "_BLOCK", draw.choice([7, 1000]))
    accumulate, to = draw.choice(["float32", "float64"]), draw.choice(list(_NAMES))
    dtype = draw.choice([None, *_KINDS])
    report = dcp.merge(
        sources,
        tmp_path / _NAMES[to],
        weights=weights,
        accumulate=accumulate,
        dtype=dtype,
        files=draw.randint(1, 3),
        executor="inline",
    )
    made = dcp.read(tmp_path / _NAMES[to])
    assert torch.equal(made["steps"], states[0]["steps"])
    assert report.unmerged == ("steps",)
    for name in shapes:
        kind = dtype or kinds[name][0]
        tensors = [state[name] for state in states]
        if weights == [1.0] and kind == kinds[name][0]:
            assert same(made[name], tensors[0])
        else:
            assert same(made[name], added(tensors, weights, kind, accumulate)), name


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """3 MiB each, in three formats, with values and a nested state."""
    return save_three(tmp_path_factory.mktemp("three"))


def save_three(folder: Path, elements: int = 1 << 18) -> list[Path]:
    """Of so many elements a tensor."""
    states = [states_of(number, elements) for number in range(3)]
    dcp.save(
        {"model": states[0], "lr": 0.1}, checkpoint_id=folder / "a", no_dist=True, user_metadata={"step": 7}
    )
    save_file({f"model.{name}": tensor for name, tensor in states[1].items()}, folder / "b.safetensors")
    torch.save({"model": states[2], "lr": 0.3}, folder / "c.pt")
    return [folder / "a", folder / "b.safetensors", folder / "c.pt"]


def states_of(number: int, elements: int = 1 << 18) -> State:
    """Of the checkpoint of that number."""
    torch.manual_seed(number)
    return {f"t{n}": torch.randn(elements).to(torch.bfloat16) for n in range(6)}


_WEIGHTS = [0.5, 0.3, 0.2]


def check_three(target: Path, elements: int = 1 << 18) -> None:
    """The sum of these."""
    states = [states_of(number, elements) for number in range(3)]
    made = dcp.read(target)
    for name in states[0]:
        expected = added([state[name] for state in states], _WEIGHTS, "bfloat16", "float32")
        assert same(made["model"][name] if "model" in made else made[f"model.{name}"], expected)


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_values_and_nesting_are_the_first_ones(three: list[Path], tmp_path: Path, to: str) -> None:
    """And it is told from what it was made; what was measured of one source is not said of the sum."""
    report = dcp.merge(three, tmp_path / _NAMES[to], weights=_WEIGHTS)
    check_three(tmp_path / _NAMES[to])
    if to != "safetensors":  # where such values are for conversions alone
        assert dcp.read(tmp_path / _NAMES[to])["lr"] == 0.1
    assert report.format == to
    assert [weight for _, weight in report.weights] == _WEIGHTS
    if to == "dcp":
        origin = dcp.open_index(tmp_path / "out").provenance
        assert dcp.open_index(tmp_path / "out").user == {"step": 7}  # the others have none
        assert [one["weight"] for one in origin["merged_from"]] == _WEIGHTS
        assert [one["format"] for one in origin["merged_from"]] == ["dcp", "safetensors", "torch_save"]


def test_the_bytes_are_the_same_however_it_is_done(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, in others, in windows of any size, in other shards."""
    dcp.merge(three, tmp_path / "one.safetensors", weights=_WEIGHTS, executor="inline")
    monkeypatch.setattr(tasks, "TASK_BYTES", 3 << 18)
    dcp.merge(three, tmp_path / "processes.safetensors", weights=_WEIGHTS, workers=2)
    monkeypatch.setattr(tasks, "WINDOW_BYTES", 250_003)
    dcp.merge(three, tmp_path / "windows.safetensors", weights=_WEIGHTS, executor="inline")
    whole = (tmp_path / "one.safetensors").read_bytes()
    assert (tmp_path / "processes.safetensors").read_bytes() == whole
    assert (tmp_path / "windows.safetensors").read_bytes() == whole


def test_formulas_and_averages() -> None:
    """Factors are computed exactly and rounded once; averages add up to one."""
    assert formula_weights("A + 0.4*(B - C)", ["A", "B", "C"]) == (1.0, 0.4, -0.4)
    assert formula_weights("0.1*A + 0.2*A - -B/4", ["A", "B"]) == (0.3, 0.25)
    assert average_weights(4, None) == (0.25,) * 4
    decayed = average_weights(3, 0.5)
    assert decayed == pytest.approx((4 / 7, 2 / 7, 1 / 7), rel=1e-15)
    assert sum(average_weights(100, 0.999)) == pytest.approx(1.0, abs=1e-15)


def test_weights_are_any_real_numbers() -> None:
    """Of numpy, fractions and torch, one by one or as one array: what float64 has of them."""
    half = np.float32(0.1)
    given: list[Any] = [half, np.int8(-2), Fraction(1, 4), torch.tensor(0.5), np.array(3.0), 7]
    expected = (float(half), -2.0, 0.25, 0.5, 3.0, 7.0)
    made = weights_of_sources(len(given), given, None)
    assert made == expected and {type(one) for one in made} == {float}
    arrays: list[Any] = [np.array([0.25, 0.75], np.float32), torch.tensor([0.25, 0.75])]
    for array in arrays:
        assert weights_of_sources(2, array, None) == weights_of_adapters(2, array) == (0.25, 0.75)
    assert weights_of_sources(2, None, None, np.float32(0.5)) == weights_of_sources(2, None, None, 0.5)
    with pytest.raises(OptionError, match="decay must be between 0 and 1, not True"):
        weights_of_sources(2, None, None, True)


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "A",
        "A + C",
        "A * B",
        "A / B",
        "A + B / 0",
        "A + B + 1",
        "A ** 2 + B",
        "A + B.real",
        "f(A) + B",
        "A + 1e999*B",
        "A + B*" + "9" * 400,
        "(" * 400 + "A+B" + ")" * 400,
        "A+B" * 2000,
        "A + True*B",
        "__import__('os').abort()",
    ],
)
def test_formulas_that_are_none(formula: str) -> None:
    """A typed error, whatever is written; nothing is evaluated."""
    with pytest.raises(OptionError, match=r"^formula: "):
        formula_weights(formula, ["A", "B"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": [1.0]}, "1 weights are given for 3 sources"),
        (
            {"weights": [True, float("nan"), "2"]},
            "weights: number 1 is True, number 2 is nan, number 3 is '2'; they must be finite",
        ),
        (
            {"weights": [np.bool_(True), np.float32("inf"), torch.ones(1)]},
            "1 is .*True.*, .*2 is .*inf.*3 is",
        ),
        ({"weights": [1j, None, torch.tensor(float("nan"))]}, "number 1 is 1j, number 2 is None, number 3"),
        ({"weights": 1.0}, "weights: 1.0 is no list"),
        ({"weights": "0.5"}, "weights: '0.5' is no list"),
        ({"weights": [1, 1, 1], "formula": "A+B+C"}, "one of them"),
        ({"accumulate": "float16"}, "accumulate must be one of"),
        ({"last": 3}, "run, which is missing"),
        ({"decay": 0.9}, "run, which is missing"),
        ({"run": "r", "last": 1}, "not with sources"),
        ({"adapter_weights": [1.0]}, "for 0 adapters"),
        ({"adapters": "lora"}, r"adapters: 'lora' is one; give a list"),
        ({"weights": [1.0, 10**400, 1.0]}, "number 2 is 1000.* finite"),
        ({"formula": 5}, "no sum of sources"),
    ],
)
def test_options_that_cannot_be(
    three: list[Path], tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    """Before anything is opened or written."""
    with pytest.raises(OptionError, match=words):
        dcp.merge(three, tmp_path / "out", **options)
    assert names_in(tmp_path) == []


def test_all_that_does_not_go_together_is_named_at_once(tmp_path: Path) -> None:
    """Missing tensors of either side, shapes, kinds; nothing is written."""
    one = {
        "same": torch.ones(3),
        "shape": torch.ones(3),
        "kind": torch.ones(3),
        "mine": torch.ones(1),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    other = {
        "same": torch.ones(3),
        "shape": torch.ones(1, 3),
        "kind": torch.ones(3, dtype=torch.int64),
        "theirs": torch.ones(1),
        "complex": torch.ones(2, dtype=torch.complex64),
    }
    dcp.save(one, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp.save(other, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(PlanError) as caught:
        dcp.merge([tmp_path / "one", tmp_path / "other"], tmp_path / "out")
    assert sorted(caught.value.fqns) == ["complex", "kind", "mine", "shape", "theirs"]
    for words in (
        "'shape' has the shapes (3,), (1, 3)",
        "'kind' is float32, int64",
        "'mine' is not in 2",
        "'theirs' is not in 1",
        "'complex' is complex64, which is not added",
    ):
        assert words in str(caught.value)
    assert names_in(tmp_path) == ["one", "other"]
    exclude = ["complex", "kind", "mine", "shape", "theirs"]
    dcp.merge([tmp_path / "one", tmp_path / "other"], tmp_path / "out", exclude=exclude)
    assert torch.equal(dcp.read(tmp_path / "out")["same"], torch.ones(3))
    with pytest.raises(MissingKeyError, match="nowhere"):
        dcp.merge([tmp_path / "one", tmp_path / "other"], tmp_path / "out2", only=["same", "nowhere"])


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_what_is_no_number_or_too_large_is_never_published(tmp_path: Path, to: str) -> None:
    """All tensors are named, with how many elements; nothing stays, also not of what was written."""
    good, bad = torch.ones(1000), torch.ones(1000)
    bad[7], bad[999] = float("nan"), float("inf")
    large = torch.full((5,), 40_000.0)
    state = {"good": good, "bad": bad, "large": large}
    for number in range(2):
        dcp.save(state, checkpoint_id=tmp_path / f"in{number}", no_dist=True)
    sources = [tmp_path / "in0", tmp_path / "in1"]
    with pytest.raises(PlanError) as caught:
        dcp.merge(sources, tmp_path / _NAMES[to], weights=[1, 1], to=to, dtype="float16")
    assert caught.value.fqns == ["bad", "large"]
    assert "'bad' (2 NaN or infinite)" in str(caught.value)
    assert "'large' (5 too large for its dtype)" in str(caught.value)
    assert names_in(tmp_path) == ["in0", "in1"]
    dcp.merge(sources, tmp_path / _NAMES[to], weights=[1, 1], to=to, dtype="bfloat16", exclude="bad")
    assert dcp.read(tmp_path / _NAMES[to])["large"].tolist() == [79872.0] * 5


def test_selection_and_names_are_of_each_source(three: list[Path], tmp_path: Path) -> None:
    """One source may have what the others lack, as an optimizer, if it is left out."""
    dcp.save(
        {"net": states_of(1), "optimizer": {"m": torch.ones(4)}}, checkpoint_id=tmp_path / "t", no_dist=True
    )
    sources = [three[0], tmp_path / "t"]
    with pytest.raises(PlanError, match=r"'optimizer\.m' is not in 1"):
        dcp.merge(sources, tmp_path / "out", rename={"^(model|net)\\.": ""})
    dcp.merge(sources, tmp_path / "out", exclude=["optimizer", "lr"], rename={"^(model|net)\\.": ""})
    made = dcp.read(tmp_path / "out")
    assert same(made["t0"], added([states_of(n)["t0"] for n in range(2)], [0.5, 0.5], "bfloat16", "float32"))
    assert made.keys() == states_of(0).keys()


def test_what_is_tied_in_one_source_only_is_not_tied(tmp_path: Path) -> None:
    """Both names get their own sum; what is tied in all of them stays so."""
    w, v = torch.ones(50), torch.full((50,), 3.0)
    torch.save({"a": w, "b": w, "c": w}, tmp_path / "1.pt")
    torch.save({"a": w, "b": w, "c": v}, tmp_path / "2.pt")
    dcp.merge([tmp_path / "1.pt", tmp_path / "2.pt"], tmp_path / "out.pt")
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert [made[name][0].item() for name in "abc"] == [1.0, 1.0, 2.0]
    assert made["a"].data_ptr() == made["b"].data_ptr() != made["c"].data_ptr()


def test_damage_of_any_source_is_noticed(three: list[Path], tmp_path: Path) -> None:
    """With the path of the file that has it; nothing stays."""
    for name in ("1", "2"):
        dcp.convert(three[0], tmp_path / name, to="dcp")
    (data,) = (tmp_path / "2").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[1 << 18] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        dcp.merge([tmp_path / "1", tmp_path / "2"], tmp_path / "out")
    assert caught.value.path == str(data)
    assert str(caught.value).startswith(f"{tmp_path / '2'}: tensor") and f"of {data.name} has" in str(
        caught.value
    )
    assert names_in(tmp_path) == ["1", "2"]


@pytest.mark.parametrize("to", ["safetensors", pytest.param("dcp", marks=pytest.mark.exhaustive)])
def test_sources_and_target_on_s3(tmp_path: Path, s3_server: S3Server, s3_root: str, to: str) -> None:
    """Beside local ones; a sum that cannot be leaves no object, also where the one file is the target, which
    is sent in several parts."""
    elements = 5 << 17
    three = save_three(tmp_path, elements)
    options = s3_server.storage_options
    both: dict[str, Any] = {
        "storage_options": options,
        "target_options": options | {"part_bytes": 5 << 20},
    }
    dcp.convert(three[1], f"{s3_root}/b", to="dcp", files=2, chunks="split", target_options=options)
    dcp.convert(three[2], f"{s3_root}/c.pt", to="torch", target_options=options)
    sources = [str(three[0]), f"{s3_root}/b", f"{s3_root}/c.pt"]
    target = f"{s3_root}/{_NAMES[to]}"
    dcp.merge(sources, target, weights=_WEIGHTS, **both)
    dcp.convert(target, tmp_path / "here.pt", to="torch", storage_options=options)
    check_three(tmp_path / "here.pt", elements)
    before = objects_of(s3_server, s3_root)
    with pytest.raises(PlanError, match="6 of the sums"):
        dcp.merge(sources, f"{s3_root}/bad-{_NAMES[to]}", weights=[3e38, 3e38, 1], **both)
    assert objects_of(s3_server, s3_root) == before


def objects_of(server: S3Server, root: str) -> list[str]:
    """Names of all that is below."""
    with raw_s3(server) as raw:
        assert not raw.uploads(root)
        return sorted(raw.list(root))


def test_the_target_is_none_of_the_sources(three: list[Path], tmp_path: Path) -> None:
    """Neither the second one nor a file of it, also where it could be replaced."""
    for target in (three[0], three[1], three[2]):
        with pytest.raises(OptionError, match="another place"):
            dcp.merge(three, target, overwrite=True)
    dcp.merge(three, tmp_path / "out", weights=_WEIGHTS)
    with pytest.raises(CheckpointConflictError):
        dcp.merge(three, tmp_path / "out")


def test_the_target_is_none_of_the_sources_by_another_way(tmp_path: Path) -> None:
    """Through a link or a folder beside it; nor the folder that has one, whose weights would go."""
    own, linked = tmp_path / "own", tmp_path / "linked"
    own.mkdir()
    linked.symlink_to(own)
    source = own / "model.safetensors"
    save_file({"weight": torch.ones(3)}, source)
    before = source.read_bytes()
    places: list[Path | str] = [linked / source.name, f"{linked}/../own/{source.name}", own, linked]
    for target in places:
        with pytest.raises(OptionError, match="another place"):
            dcp.merge([source], target, to="safetensors", weights=[2.0], overwrite=True)
        assert names_in(own) == [source.name]
        assert source.read_bytes() == before


_PROGRAM = """
import json, os, signal, sys
from dcp.conversion.copying import tasks
tasks.TASK_BYTES = 1 << 20
from dcp.conversion.merge import merge
from dcp.conversion.copying.sinks import observers
*sources, target, kill_at, options = sys.argv[1:]
steps = []
def observe(op, name):
    steps.append(op)
    if len(steps) == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
observers.append(observe)
report = merge(sources, target, executor="inline", **json.loads(options))
print(len(steps), report.tasks, report.tasks_resumed)
"""


def _killed(sources: list[Path], target: Path, kill_at: int, **options: Any) -> tuple[int, list[int]]:
    """(exit status, steps, tasks and those resumed) of a merge that dies before a step; 0: it does not."""
    done = run_program("-c", _PROGRAM, *sources, target, str(kill_at), json.dumps(options))
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, list(map(int, done.stdout.split()))


def test_a_killed_merge_goes_on(three: list[Path], tmp_path: Path) -> None:
    """What is done is not done again, and the bytes are those of a merge that was not killed."""
    target = tmp_path / "out.safetensors"
    _, (steps, tasks, _) = _killed(three, tmp_path / "whole.safetensors", 0, weights=_WEIGHTS)
    assert tasks >= 3
    assert _killed(three, target, steps - 6, weights=_WEIGHTS)[0] == -signal.SIGKILL
    assert not target.exists()
    assert _killed(three, target, 0, weights=_WEIGHTS)[1][2] > 0
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert names_in(tmp_path) == ["out.safetensors", "whole.safetensors"]


@pytest.mark.parametrize(
    "change",
    [
        {"weights": [0.5, 0.3, 0.25]},
        pytest.param({"formula": "A + B - C"}, marks=pytest.mark.exhaustive),
        pytest.param({"weights": _WEIGHTS, "accumulate": "float64"}, marks=pytest.mark.exhaustive),
        pytest.param({"weights": _WEIGHTS, "order": [1, 0, 2]}, marks=pytest.mark.exhaustive),
    ],
)
def test_another_merge_begins_anew(three: list[Path], tmp_path: Path, change: dict[str, Any]) -> None:
    """With another weight, type of sums, or order of the sources nothing that a killed one did is taken."""
    target = tmp_path / "out.safetensors"
    assert _killed(three, target, 12, weights=_WEIGHTS)[0] == -signal.SIGKILL
    sources = [three[number] for number in change.pop("order", range(3))]
    assert _killed(sources, target, 0, **change)[1][2] == 0
    assert _killed(sources, tmp_path / "whole.safetensors", 0, **change)[1][2] == 0
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_killed_anywhere_and_finished(three: list[Path], tmp_path: Path, to: str) -> None:
    """At every step: nothing is there before all of it is, and the next run ends it."""
    _, (steps, *_) = _killed(three, tmp_path / f"whole-{_NAMES[to]}", 0, weights=_WEIGHTS, to=to)
    for kill_at in range(1, steps + 1, 3):
        target = tmp_path / str(kill_at) / _NAMES[to]
        assert _killed(three, target, kill_at, weights=_WEIGHTS, to=to)[0] == -signal.SIGKILL
        if not target.exists():
            assert _killed(three, target, 0, weights=_WEIGHTS, to=to)[0] == 0
        check_three(target)


def names_in(folder: Path) -> list[str]:
    """What is in it."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.exhaustive
def test_a_faulty_sum_that_was_killed_is_refused_by_the_next_run(tmp_path: Path) -> None:
    """What was found before the death is not forgotten."""
    for number in range(2):
        state = {f"t{n}": torch.full((1 << 18,), float("nan") if n == 0 else 1.0) for n in range(4)}
        dcp.save(state, checkpoint_id=tmp_path / str(number), no_dist=True)
    sources = [tmp_path / "0", tmp_path / "1"]
    program = _PROGRAM.replace("len(steps) == int(kill_at)", "steps.count('ledger') == int(kill_at)")
    died = run_program("-c", program, *sources, tmp_path / "out", "3", "{}")
    assert died.returncode == -signal.SIGKILL, died.stderr
    again = run_program("-c", _PROGRAM, *sources, tmp_path / "out", "0", "{}")
    assert "FaultySumsError: 1 of the sums" in again.stderr and "'t0' (262,144 NaN" in again.stderr
    assert names_in(tmp_path) == ["0", "1"]


@pytest.mark.exhaustive
def test_no_torch_is_needed(three: list[Path], tmp_path: Path) -> None:
    """In an interpreter that cannot import it."""
    program = "import sys; sys.modules['torch'] = None\nfrom dcp.conversion.merge import merge\n"
    program += f"merge({list(map(str, three))!r}, {str(tmp_path / 'out.pt')!r}, weights={_WEIGHTS})"
    done = run_program("-c", program)
    assert done.returncode == 0, done.stderr
    check_three(tmp_path / "out.pt")


def run_of(root: Path, steps: list[int]) -> dict[int, torch.Tensor]:
    """A manager's run with these steps; the weights by step."""
    found = {}
    with dcp.CheckpointManager(root) as manager:
        for step in steps:
            torch.manual_seed(step)
            found[step] = torch.randn(100)
            manager.save(step, {"w": found[step]}, metrics={"loss": float(step)}, force=True)
    return found


def test_averages_over_a_run(tmp_path: Path) -> None:
    """The newest steps, equally or by exponential decay, which adds up to one; metrics are not taken over."""
    weights = run_of(tmp_path / "run", [10, 20, 30, 40])
    report = dcp.merge([], tmp_path / "mean", run=tmp_path / "run", last=3, accumulate="float64")
    newest = [weights[step] for step in (40, 30, 20)]
    assert same(dcp.read(tmp_path / "mean")["w"], added(newest, [1 / 3] * 3, "float32", "float64"))
    assert [Path(name).name[-2:] for name, _ in report.weights] == ["40", "30", "20"]
    dcp.merge([], tmp_path / "ema", run=tmp_path / "run", last=3, decay=0.9, accumulate="float64")
    factors = [1.0, 0.9, 0.9**2]
    expected = added(newest, [factor / sum(factors) for factor in factors], "float32", "float64")
    assert torch.allclose(dcp.read(tmp_path / "ema")["w"], expected, rtol=1e-7)
    user = dcp.open_index(tmp_path / "ema").user
    assert user["step"] == 40 and "metrics" not in user
    with pytest.raises(CheckpointNotFoundError, match="there are 4 committed steps, and 5 are asked for"):
        dcp.merge([], tmp_path / "more", run=tmp_path / "run", last=5)


def test_damaged_and_partial_steps_are_refused_by_name(tmp_path: Path) -> None:
    """A step that is being written or deleted is not there; of the others none is passed over in silence."""
    run_of(tmp_path / "run", [1, 2, 3, 4])
    (tmp_path / "run/step-00000009").mkdir()
    partial = {"step": 5, "partial": ["model"]}  # as of an emergency save that is cut short
    fifth = tmp_path / "run/step-00000005"
    dcp.save({"w": torch.ones(100)}, checkpoint_id=fifth, no_dist=True, user_metadata=partial)
    manifest = tmp_path / "run/step-00000003/manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(PlanError) as caught:
        dcp.merge([], tmp_path / "out", run=tmp_path / "run", last=4)
    assert "step 5 has only" in str(caught.value)
    assert "step 3 is damaged" in str(caught.value)
    assert len(caught.value.problems) == 2


def test_the_command_line(three: list[Path], tmp_path: Path) -> None:
    """As it is documented: weights, a formula, a run; JSON, and errors of one line."""
    sources = list(map(str, three))

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["merge", *arguments])

    done = run(*sources, "-o", str(tmp_path / "out.safetensors"), "--weights", "0.5,0.3,0.2")
    assert done.exit_code == 0, done.output
    assert f"0.3 * {three[1]}" in done.stdout
    check_three(tmp_path / "out.safetensors")
    done = run(*sources, "-o", str(tmp_path / "out"), "--formula", "A + 0.4*(B - C)", "--json")
    assert [weight for _, weight in json.loads(done.stdout)["weights"]] == [1.0, 0.4, -0.4]
    run_of(tmp_path / "run", [1, 2])
    done = run("--run", str(tmp_path / "run"), "--last", "2", "--decay", "0.5", "-o", str(tmp_path / "ema"))
    assert done.exit_code == 0, done.output
    assert "0.666667 * " in done.stdout
    for wrong in (["--weights", "1,x,1"], []):
        assert run(*sources, *wrong).exit_code == 2
    assert run(*sources, "-o", str(tmp_path / "o"), "--formula", "A + B").exit_code == 3
