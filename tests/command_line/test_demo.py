"""The demo, end to end, with fewer steps. Internal: checks and places of the demo are tested one by one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import torch

import dcp
from dcp.demo.checks import compare_digests, largest_difference
from dcp.demo.places import BucketPlace, FolderPlace, Place, newest_checkpoint
from dcp.demo.s3_server import S3Server
from dcp.demo.stock import load_damaged, load_with_stock_torch
from tests.command_line.cli_support import run as command
from tests.support.programs import Program

ROOT = Path(__file__).parents[2]


def start(*command: str | Path, is_fresh: bool = False) -> subprocess.Popen[str] | Program:
    """Start ``python COMMAND`` without a terminal; unless ``is_fresh``, forked with torch imported."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    options |= {"cwd": ROOT, "env": os.environ | {"PYTHONIOENCODING": "utf-8"}}
    return (
        subprocess.Popen([sys.executable, *command], **options) if is_fresh else Program(*command, **options)
    )


def read_until_served(process: subprocess.Popen[str] | Program) -> tuple[str, str]:
    """Read the output until the catalog is served. Return the output and the URL."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if found := re.search(r"The catalog is at (http://\S+) until Ctrl-C", line):
            return output, found[1]
    raise AssertionError(output)


def processes_of_jobs(root: Path) -> set[int]:
    """Return live launchers and ranks of the demo in ``root``: processes with open logs of the demo."""
    files = {one.pid: one.info["open_files"] or () for one in psutil.process_iter(["open_files"])}
    return {pid for pid, opened in files.items() if any(f"{root}/logs/" in file.path for file in opened)}


@pytest.mark.timeout(1200)
def test_demo_from_end_to_end(tmp_path: Path) -> None:
    """The demo passes its own checks, and the test confirms its claims about files and steps. Then the demo
    serves the run to a browser, until Ctrl-C."""
    root = tmp_path / "demo"
    process = start("-m", "dcp.demo", "--root", root, "--save-every", "1", "--serve")
    output, url = read_until_served(process)
    assert "uninterrupted" in httpx.get(url, headers={"accept": "text/html"}, trust_env=False).text
    process.send_signal(signal.SIGINT)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert re.search(r"ok +dcp serve shut down cleanly\n +The catalog is stopped\.", output)
    assert "FAILED" not in output
    assert re.search(r"All ([0-9]+) checks passed", output), output

    halves = re.findall(r"^ +(__[01]_0\.[0-9a-f]+\.distcp) +([0-9,]+) +([0-9,]+)$", output, re.MULTILINE)
    assert len(halves) == 2
    killed = root / "checkpoints" / "run" / "step-00000003"
    for name, size, full in halves:
        assert int(size.replace(",", "")) == 8 << 20
        assert int(full.replace(",", "")) > 8 << 20
        assert not (killed / name).exists()  # the resumed job saved the same step and removed the files
    assert re.search(r"step-00000003 .* incomplete( |$)", output, re.MULTILINE)

    for ranks in (1, 2, 3):
        assert re.search(rf"on {ranks} ranks?: training continues with step 3", output)
        log = (root / "results" / f"resumed-on-{ranks}" / "losses.jsonl").read_text().splitlines()
        assert len(log) == 2
    loss_columns = re.findall(r"^ +(uninterrupted|resumed on 2) .* ([0-9.]+)$", output, re.MULTILINE)
    assert len(loss_columns) == 2
    assert loss_columns[0][1] == loss_columns[1][1]

    assert (root / "checkpoints" / "exports" / "step-00000004" / "model.safetensors").exists()
    assert len(re.findall(r"downloaded,[^:]*:\s+all\s+[0-9]+\s+tensors", output)) == 2

    rows = command("ls", root / "checkpoints" / "run", "--json").json
    assert [(row["step"], row["state"]) for row in rows] == [(step, "committed") for step in (1, 2, 3, 4)]
    assert not processes_of_jobs(root)


@pytest.mark.exhaustive  # the demo ends the same processes at its regular end
@pytest.mark.timeout(600)
def test_sigterm_ends_the_demo_and_its_processes(tmp_path: Path) -> None:
    """SIGTERM while ranks train ends the demo with status 143, and its launcher and ranks."""
    root = tmp_path / "demo"
    process = start("-m", "dcp.demo", "--root", root, "--save-every", "1000", is_fresh=True)
    log = root / "results" / "uninterrupted" / "losses.jsonl"
    give_up = time.monotonic() + 400
    while not (log.exists() and log.read_text()) and time.monotonic() < give_up:
        assert process.poll() is None
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert {rank.pid for rank in children} >= processes_of_jobs(root) and len(processes_of_jobs(root)) == 3
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert psutil.wait_procs(children, timeout=20)[1] == []  # the fork server ends on its own
    assert not processes_of_jobs(root)


@pytest.mark.parametrize("command", [("dcp.demo",), ("dcp", "demo")], ids=["module", "dcp demo"])
def test_demo_needs_an_empty_folder(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A folder that is not empty is refused with status 2, and not changed."""
    (tmp_path / "mine").write_text("mine")
    process = start("-m", *command, "--root", tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert "not empty" in output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_checks_fail_without_data(tmp_path: Path) -> None:
    """Missing digests or logs count as different, so a check cannot pass without data. An empty or missing
    run has no newest checkpoint."""
    assert newest_checkpoint(tmp_path) is newest_checkpoint(tmp_path / "none") is None
    assert compare_digests({}, {}) == "there are no digests to compare with"
    assert compare_digests({"a": "1"}, {}) == "1 of 1 entries differ, such as a"
    assert compare_digests({"a": "1", "rng.rank-0": "2"}, {"a": "1"}, without="rng.") == ""
    assert largest_difference({1: 2.0}, {}, [1]) == float("inf")
    assert largest_difference({1: 2.0}, {1: 2.0}, []) == float("inf")
    assert largest_difference({1: [1.0, 2.0]}, {1: [1.0, 2.5]}, [1]) == 0.5
    assert largest_difference({1: [1.0, 2.0]}, {1: [1.0]}, [1]) == float("inf")


# -- on S3 ---------------------------------------------------------------------------------------------------


def state(mebibytes: int = 20) -> dict[str, torch.Tensor]:
    """Return tensors of one MiB, together more than two parts of an upload."""
    tensors = torch.arange(mebibytes << 18, dtype=torch.float32).chunk(mebibytes)
    return {f"layer.{number}": tensor.clone() for number, tensor in enumerate(tensors)}


def damage_a_copy(place: Place, job: str) -> None:
    """Copy a checkpoint and flip a bit of the copy. Assert that verification finds damage only there."""
    place.copy(job, 2, f"{job}-copy")
    assert place.findings(f"{job}-copy", 2) == []
    fqn = place.flip_bit(f"{job}-copy", 2)
    (finding,) = place.findings(f"{job}-copy", 2)
    assert fqn in finding
    assert place.findings(job, 2) == []
    assert place.newest(f"{job}-copy") is None and place.newest(job) == "step-00000002"
    with pytest.raises(dcp.CorruptCheckpointError):
        dcp.load(
            state(2),
            checkpoint_id=place.checkpoint(f"{job}-copy", 2),
            storage_options=place.storage_options,
            no_dist=True,
        )


def test_copies_and_damage_are_the_same_in_folders_and_on_s3(s3_server: S3Server, tmp_path: Path) -> None:
    """Copies and damage through the stores have the same effect in folders and on S3."""
    for place in (FolderPlace(tmp_path), BucketPlace(s3_server)):
        job = f"demo-{tmp_path.name}-whole"
        url = place.checkpoint(job, 2)
        dcp.save(state(2), checkpoint_id=url, storage_options=place.storage_options, no_dist=True)
        damage_a_copy(place, job)


def test_stock_torch_reads_from_s3_by_environment_variables(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock torch loads the same bytes from S3, and loads a flipped bit without an error."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    place, job = BucketPlace(s3_server), f"demo-{tmp_path.name}-stock"
    whole = place.checkpoint(job, 2)
    dcp.save(state(2), checkpoint_id=whole, no_dist=True)
    place.copy(job, 2, f"{job}-damaged")
    place.flip_bit(f"{job}-damaged", 2)
    wanted = load_with_stock_torch(whole)
    assert len(wanted) == 2
    by_stock, by_dcp = load_damaged(place.checkpoint(f"{job}-damaged", 2))
    assert isinstance(by_stock, dict) and len(wanted.items() - by_stock.items()) == 1
    assert by_dcp.startswith("CorruptCheckpointError")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_demo_on_s3_from_end_to_end(tmp_path: Path) -> None:
    """The demo on S3 passes its checks; the killed save left half of each rank's upload, and no object."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "dcp.demo", "--s3", "--root", str(tmp_path), "--save-every", "2"]
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=880)
        output.seek(0)
        text = output.read()
    assert done.returncode == 0, text
    assert "FAILED" not in text and re.search(r"All ([0-9]+) checks passed", text), text
    halves = re.findall(r"^ +(__[01]_0\.[0-9a-f]+\.distcp) +([0-9,]+) +([0-9,]+)$", text, re.MULTILINE)
    assert len(halves) == 2
    for _, size, full in halves:
        assert int(size.replace(",", "")) == 8 << 20 < int(full.replace(",", ""))
    assert re.search(r"step-00000006\s+not\s+at\s+all", text)
    assert not (tmp_path / "s3").exists() and not (tmp_path / "checkpoints").exists()
