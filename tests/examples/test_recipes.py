"""Scripts of examples/, run as by a user: stopped, resumed, and compared with an uninterrupted run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import dcp
from tests.support.programs import Program, run_program
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

TIMEOUT_SECONDS = 600.0

UPSTREAM_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".json")
"""Suffixes of files that the Trainer and Accelerate write."""


def command(script: str, folder: Path, *options: object, ranks: int = 0) -> list[str]:
    """Return the arguments of ``python``; with ``ranks``, of torchrun on a free local port."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [
        *(torchrun if ranks else []),
        str(EXAMPLES / script),
        *("--checkpoints", str(folder / "checkpoints")),
        *("--losses", str(folder / "losses.jsonl")),
        *map(str, options),
    ]


def environment() -> dict[str, str]:
    """Return an environment with one thread a process, so ranks do not compete for the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(script: str, folder: Path, *options: object, ranks: int = 0) -> str:
    """Run to the end, and return the output."""
    words = command(script, folder, *options, ranks=ranks)
    done = run_program(*words, env=environment(), timeout_seconds=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stop(script: str, folder: Path, *options: object, at_line: int, by: signal.Signals) -> int:
    """Run until the losses have ``at_line`` lines, then send a signal. Return the exit status."""
    losses = folder / "losses.jsonl"
    deadline = time.monotonic() + TIMEOUT_SECONDS
    words = command(script, folder, *options)
    with Program(*words, env=environment(), stdout=subprocess.DEVNULL) as process:
        while not losses.exists() or losses.read_text().count("\n") < at_line:
            assert process.poll() is None, f"ended by itself, with status {process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(by)
        return process.wait(TIMEOUT_SECONDS)


def lines(folder: Path) -> list[dict[str, float]]:
    """Return the records of a script, one a step. JSON keeps all bits of a float."""
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def as_left_at(step: int, folder: Path, copy: Path) -> Path:
    """Copy a finished run's checkpoints as they were when ``step`` was committed."""
    shutil.copytree(folder / "checkpoints", copy / "checkpoints")
    for checkpoint in (copy / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return copy


def steps(noted: Sequence[dict[str, float]]) -> list[int]:
    """Return the step numbers."""
    return [int(line["step"]) for line in noted]


@pytest.mark.exhaustive  # test_pages.py kills the quick start's loop; the test below resumes the script
def test_plain_pytorch_resumes_after_sigkill_and_sigterm(tmp_path: Path) -> None:
    """After SIGKILL and SIGTERM each loss equals the uninterrupted run's, and the last step is saved."""
    # enough steps that a busy machine can stop the run before its end
    options = ("--steps", 600, "--every", 20)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    run("plain_pytorch.py", whole, *options)
    expected = lines(whole)
    assert steps(expected) == list(range(1, 601))

    assert stop("plain_pytorch.py", stopped, *options, at_line=50, by=signal.SIGKILL) == -signal.SIGKILL
    noted = lines(stopped)
    assert stop("plain_pytorch.py", stopped, *options, at_line=len(noted) + 30, by=signal.SIGTERM) == 0
    resumed = lines(stopped)[len(noted) :]
    assert 1 < steps(resumed)[0] <= steps(noted)[-1] + 1
    for line in [*noted, *resumed]:
        assert line == expected[int(line["step"]) - 1]
    last = steps(resumed)[-1]
    assert last < 600
    with dcp.CheckpointManager(stopped / "checkpoints", handle_sigterm=False) as manager:
        assert manager.latest() == last


def train_in_pool(rank: int, world_size: int, script: str, options: Sequence[str]) -> None:
    """Run a script's training loop on a rank of the pool."""
    import importlib

    sys.path.insert(0, str(EXAMPLES))
    try:
        module = importlib.import_module(script)
        module.train(module.parser().parse_args(options))
    finally:
        sys.path.remove(str(EXAMPLES))


def train(script: str, folder: Path, *options: object, ranks: int) -> None:
    """Run the training loop of a script on ``ranks`` ranks of the pool, which is faster than torchrun."""
    program = command(script + ".py", folder, *options)
    run_ranks(ranks, train_in_pool, script, program[program.index("--checkpoints") :])


def test_plain_pytorch_under_ddp_resumes_on_two_and_one(tmp_path: Path) -> None:
    """Two ranks resume bit for bit, with generators and positions in the data; one rank continues."""
    options = ("--steps", 17, "--every", 6)
    folders = [tmp_path / name for name in ("whole", "two", "one")]
    for folder in folders:
        folder.mkdir()
    train("plain_pytorch", folders[0], *options, ranks=2)
    expected = lines(folders[0])
    for folder in folders[1:]:
        as_left_at(6, folders[0], folder)
    train("plain_pytorch", folders[1], *options, ranks=2)
    assert lines(folders[1]) == expected[6:]
    train("plain_pytorch", folders[2], *options, ranks=1)
    assert steps(lines(folders[2])) == list(range(7, 18))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2)])
def test_plain_pytorch_sees_each_sample_once(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two changes of the number of ranks each sample is seen once."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import plain_pytorch

    seen: list[int] = []
    state = [plain_pytorch.Position(60, 0, 1).state_dict()["position"].value]
    for ranks in (before, after, 1):
        positions = [plain_pytorch.Position(60, rank, ranks) for rank in range(ranks)]
        for rank, position in enumerate(positions):
            position.load_state_dict(
                {"position": dcp.PerRank(plain_pytorch.what_is_left(state, rank, ranks))}
            )
            own = list(position)[: 6 if ranks > 1 else 60]
            position.taken += len(own)
            seen += own
        state = [position.state_dict()["position"].value for position in positions]
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_fsdp2_and_tensor_parallel_resume_on_other_meshes(tmp_path: Path, by_torchrun: bool) -> None:
    """Four ranks on a 2x2 mesh resume bit for bit; on two ranks the model is equal up to rounding."""
    options = ("--steps", 5, "--every", 3)
    folders = [tmp_path / name for name in ("whole", "same", "tp-only", "dp-only")]
    whole, same, *others = folders
    for folder in folders:
        folder.mkdir()
    if by_torchrun:
        run("fsdp2_tensor_parallel.py", whole, *options, ranks=4)
    else:
        train("fsdp2_tensor_parallel", whole, *options, "--mode", "thread", ranks=4)
    expected = lines(whole)
    assert steps(expected) == list(range(6))
    for folder in folders[1:]:
        as_left_at(3, whole, folder)

    train("fsdp2_tensor_parallel", same, *options, "--mode", "thread", ranks=4)
    assert lines(same)[1:] == expected[4:]
    modes = ("process" if by_torchrun else "thread", "thread")
    for folder, parallel, mode in zip(others, (2, 1), modes, strict=True):
        train("fsdp2_tensor_parallel", folder, *options, "--mode", mode, "--tp", parallel, ranks=2)
        assert steps(lines(folder)) == [3, 4, 5]
        assert lines(folder)[0]["validation"] == pytest.approx(expected[3]["validation"], rel=1e-5)
        with dcp.CheckpointManager(folder / "checkpoints", handle_sigterm=False) as manager:
            assert manager.latest() == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("script", ["huggingface_trainer.py", "accelerate_loop.py"])
def test_hugging_face_recipes_resume_bit_for_bit(tmp_path: Path, script: str, ranks: int) -> None:
    """Losses, gradient norms and learning rates after a resume in the second epoch equal the uninterrupted
    run's. Hugging Face writes no files of its own."""
    epoch = 40 // 4 // max(ranks, 1)
    every = epoch + 2
    options = ("--steps", 2 * every + 1, "--every", every)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    run(script, whole, *options, ranks=ranks)
    expected = lines(whole)
    assert steps(expected) == list(range(1, 2 * every + 2))
    checkpoints = whole / "checkpoints"
    assert not [path for path in checkpoints.rglob("*") if path.suffix in UPSTREAM_SUFFIXES]
    shutil.copytree(checkpoints, resumed / "checkpoints")
    later = {
        "huggingface_trainer.py": (2 * every, 2 * every + 1),  # the Trainer saves its last step
        "accelerate_loop.py": (1,),
    }
    for number in later[script]:
        for checkpoint in (resumed / "checkpoints").rglob(f"checkpoint[-_]{number}"):
            shutil.rmtree(checkpoint)
    run(script, resumed, *options, ranks=ranks)
    assert lines(resumed)[-every - 1 :] == expected[every:]


def test_every_recipe_is_documented() -> None:
    """docs/how-to/write-a-training-script.md has the command lines of each script's docstring."""
    text = (EXAMPLES.parent / "docs/how-to/write-a-training-script.md").read_text()
    for script in sorted({*EXAMPLES.glob("*.py")} - {EXAMPLES / "command_line.py"}):
        assert f"examples/{script.name}" in text
        docstring = script.read_text().split('"""')[1]
        for line in docstring.splitlines():
            if line.startswith("    "):
                assert line.strip() in text
