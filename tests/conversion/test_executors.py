"""Executors of a conversion: threads, processes and Dask; interruption; peak memory."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dcp
from tests.support.conversion import folder_of, write_adapter
from tests.support.dask_cluster import dask_cluster
from tests.support.processes import children
from tests.support.programs import Program, run_program

_ELEMENTS = 30_000
_SHARDS: dict[str, Any] = {"to": "safetensors", "shard_bytes": 4 * _ELEMENTS}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save three tensors, each a shard, which convert in three tasks."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    state = {f"t{n}": torch.full((_ELEMENTS,), n, dtype=torch.int32) for n in range(3)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _check(target: Path) -> None:
    found = dcp.read(target)
    assert [found[f"t{n}"].unique().tolist() for n in range(3)] == [[0], [1], [2]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yield the URL of a Dask scheduler with two worker processes."""
    with dask_cluster(threads=1) as made:
        yield f"dask://{made.scheduler_address.removeprefix('tcp://')}"


@pytest.mark.exhaustive  # a cluster takes ten seconds; tests/service/jobs has a job on one
def test_a_dask_cluster_converts_and_merges(cluster: str, source: Path, tmp_path: Path) -> None:
    """A task carries all its inputs, such as a map; the bytes equal those of the other executors."""
    report = dcp.convert(source, tmp_path / "model", executor=cluster, **_SHARDS)
    _check(tmp_path / "model")
    assert (report.tasks, report.tasks_resumed, report.blocks_unverified) == (3, 0, 0)
    assert folder_of(tmp_path / "model") == ["model"]
    rules = {"rules": [{"from": {"t{n}": "(a two)"}, "to": {"w{n}": "(two a)"}}], "sizes": {"two": 2}}
    for number in range(2):
        torch.manual_seed(number)
        dcp.save({"t0": torch.randn(1000)}, checkpoint_id=tmp_path / str(number), no_dist=True)
    sources = [tmp_path / "0", tmp_path / "1"]
    for executor, name in (("inline", "here.pt"), (cluster, "there.pt")):
        dcp.merge(sources, tmp_path / name, weights=[0.3, -0.7], map=rules, executor=executor)
    here, there = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("here", "there"))
    assert torch.equal(here["w0"], there["w0"])


def test_processes_report_progress(source: Path, tmp_path: Path) -> None:
    """Progress counts bytes up to the total."""
    seen: list[Any] = []
    report = dcp.convert(source, tmp_path / "model", workers=2, progress=seen.append, **_SHARDS)
    _check(tmp_path / "model")
    assert seen[-1].bytes_done == seen[-1].bytes_total == report.bytes_written
    assert seen[-1].phase == "convert"


def test_a_callers_executor_runs_the_tasks(source: Path, tmp_path: Path) -> None:
    """The caller's threads run the tasks, and the pool is not shut down."""
    with ThreadPoolExecutor(2) as pool:
        dcp.convert(source, tmp_path / "model", executor=pool, **_SHARDS)
        assert pool.submit(lambda: 5).result() == 5
    _check(tmp_path / "model")


_WAITING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
import dcp
def wait(progress):
    print("here", flush=True)
    os.read(0, 1)
source, target = sys.argv[1:3]
dcp.convert(source, target, to="safetensors", shard_bytes=120_000, workers=2, progress=wait)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL", "a worker"])
def test_an_interrupted_conversion_ends_its_processes(how: str, source: Path, tmp_path: Path) -> None:
    """Workers end with a killed command, a killed worker is not waited for, and no worker imports torch."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Program("-c", _WAITING, source, tmp_path / "model", **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "here\n"
        pids = children(run.pid)
        assert len(pids) == 2
        assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        workers = [os.pidfd_open(pid) for pid in pids]
        if how == "a worker":
            signal.pidfd_send_signal(workers[0], signal.SIGKILL)
        else:
            run.send_signal(signal.Signals[how])
        _, output = run.communicate("\n" * 9, timeout=120)
        assert run.returncode != 0 or how == "a worker", output
    for worker in workers:
        assert select.select([worker], [], [], 120)[0], "it has not ended"
        os.close(worker)


# -- memory --------------------------------------------------------------------------------------------------

_MEASURED = """
import resource, sys
import dcp
call, source_bytes, workers = sys.argv[1:4]
report = eval(call)
assert report.bytes_read >= int(source_bytes)
# Not ru_maxrss, which begins with what the process had from which this one was forked.
lines = open("/proc/self/status").read().splitlines()
own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
# The larger of the workers counts for all.
print(own + int(workers) * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def _peak_mebibytes(call: str, source_bytes: int = 1, workers: int = 2) -> float:
    """Return the peak memory of a call in a process of its own, with its workers."""
    run = run_program("-c", _MEASURED, call, str(source_bytes), str(workers), finalizes=True)
    assert run.returncode == 0, run.stderr
    return int(run.stdout) / 1024


@pytest.mark.parametrize(
    ("to", "mebibytes"),
    [
        ("safetensors", 192),
        *(pytest.param(to, 2048, marks=pytest.mark.exhaustive) for to in ("torch", "safetensors", "dcp")),
    ],
)
def test_peak_memory_is_a_few_buffers(to: str, mebibytes: int, tmp_path: Path) -> None:
    """All processes together use less than 300 MiB for a model of any size, half of which is strided."""
    rows, target = mebibytes << 20 >> 13, tmp_path / ("copy.pt" if to == "torch" else "copy")
    w, t = (torch.from_numpy(np.zeros(shape, np.float32)) for shape in ((rows, 1024), (1024, rows)))
    torch.save({"w": w, "t": t.t()}, tmp_path / "model.pt")  # numpy's zeros take no memory until written
    call = f"dcp.convert({str(tmp_path / 'model.pt')!r}, {str(target)!r}, to={to!r}, workers=2)"
    assert _peak_mebibytes(call, mebibytes << 20) < 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", [False, True])
def test_peak_memory_of_a_merge(tmp_path: Path, adapter: bool) -> None:
    """Merge eight sources of 192 MiB with two workers, or a low-rank adapter, in less than 300 MiB."""
    rows, columns = 12288, 8192
    save_file({"m.weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}, tmp_path / "0.safetensors")
    sources, adapters = [str(tmp_path / "0.safetensors")] * 8, []
    if adapter:
        factors = {"A": torch.zeros(128, columns), "B": torch.zeros(rows, 128)}
        named = {f"m.lora_{name}.weight": value for name, value in factors.items()}
        config = {"peft_type": "LORA", "r": 128, "lora_alpha": 1}
        sources, adapters = sources[:1], [str(write_adapter(tmp_path / "lora", config, named))]
    given = f"to='dcp', adapters={adapters!r}, accumulate='float64', workers=2"
    assert _peak_mebibytes(f"dcp.merge({sources!r}, {str(tmp_path / 'out')!r}, {given})") < 300


def _safetensors(path: Path, tensors: dict[str, int]) -> Path:
    """Write a sparse file of zeros from sizes in bytes by name."""
    ends = [0, *itertools.accumulate(tensors.values())]
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [end - size, end]}
        for (name, size), end in zip(tensors.items(), ends[1:], strict=True)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + ends[-1])
    return path


@pytest.mark.exhaustive
def test_a_torch_file_beyond_four_gibibytes(tmp_path: Path) -> None:
    """torch loads a file with entries and offsets of zip64, converted from a sparse source."""
    source = _safetensors(tmp_path / "large.safetensors", {"big": 5 << 30, "last": 3})
    with source.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"abc")
    dcp.convert(source, tmp_path / "large.pt", to="torch")
    loaded = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert (loaded["big"].nbytes, bytes(loaded["last"].tolist())) == (5 << 30, b"abc")
