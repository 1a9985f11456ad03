"""Who carries a conversion out, how it ends, and how much memory it takes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dcp
from tests.support.conversion import folder_of
from tests.support.dask_cluster import dask_cluster
from tests.support.processes import children

_ELEMENTS = 30_000
_SHARDS: dict[str, Any] = {"to": "safetensors", "shard_bytes": 4 * _ELEMENTS}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tensors, a shard each: three tasks."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    state = {f"t{n}": torch.full((_ELEMENTS,), n, dtype=torch.int32) for n in range(3)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _check(target: Path) -> None:
    found = dcp.read(target)
    assert [found[f"t{n}"].unique().tolist() for n in range(3)] == [[0], [1], [2]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The URL of a Dask scheduler with two worker processes."""
    with dask_cluster(threads=1) as made:
        yield f"dask://{made.scheduler_address.removeprefix('tcp://')}"


def test_a_dask_cluster_converts_and_merges(cluster: str, source: Path, tmp_path: Path) -> None:
    """What a task needs, a map among it, travels with it; the bytes are those of any executor."""
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


def test_errors_come_back_from_dask(cluster: str, tmp_path: Path) -> None:
    """A file that is gone is the same typed error as here."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "broken", no_dist=True)
    next((tmp_path / "broken").glob("*.distcp")).unlink()
    with pytest.raises(dcp.CorruptCheckpointError, match="is missing"):
        dcp.convert(tmp_path / "broken", tmp_path / "model.pt", to="torch", executor=cluster)
    assert not (tmp_path / "model.pt").exists()


def test_processes_say_how_far_they_are(source: Path, tmp_path: Path) -> None:
    """Progress counts bytes up to all of them."""
    seen: list[Any] = []
    report = dcp.convert(source, tmp_path / "model", workers=2, progress=seen.append, **_SHARDS)
    _check(tmp_path / "model")
    assert seen[-1].bytes_done == seen[-1].bytes_total == report.bytes_written
    assert seen[-1].phase == "convert"


def test_an_executor_of_the_callers(source: Path, tmp_path: Path) -> None:
    """Its threads do the work, and it is not shut down."""
    with ThreadPoolExecutor(2) as pool:
        dcp.convert(source, tmp_path / "model", executor=pool, **_SHARDS)
        assert pool.submit(lambda: 5).result() == 5
    _check(tmp_path / "model")


def test_what_an_interrupted_conversion_has_done_stays(source: Path, tmp_path: Path) -> None:
    """Unless nothing could go on from it: then the space is free again."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    target, given = tmp_path / "model", {"executor": "inline", **_SHARDS}
    for resume, left in ((False, 0), (True, 1)):
        with pytest.raises(KeyboardInterrupt):
            dcp.convert(source, target, resume=resume, progress=interrupt, **given)
        assert len(folder_of(target)) == left
    assert dcp.convert(source, target, **given).tasks_resumed == 1
    _check(target)


_WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
sys.modules["torch"] = None  # none of it is needed
import dcp
def wait(progress):
    print("here", flush=True)
    os.read(0, 1)
source, target = sys.argv[1:3]
dcp.convert(source, target, to="safetensors", shard_bytes=120_000, workers=2, progress=wait)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL", "a worker"])
def test_an_interrupted_conversion_ends_its_processes(how: str, source: Path, tmp_path: Path) -> None:
    """If only the command itself is ended; where a worker is killed nobody waits for it."""
    command = [sys.executable, "-c", _WAITING, str(source), str(tmp_path / "model")]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as run:
        assert run.stdout is not None and run.stdout.readline() == "here\n"
        workers = [os.pidfd_open(pid) for pid in children(run.pid)]
        assert len(workers) == 2
        if how == "a worker":
            signal.pidfd_send_signal(workers[0], signal.SIGKILL)
        else:
            run.send_signal(signal.Signals[how])
        _, told = run.communicate("\n" * 9, timeout=120)
        assert run.returncode != 0 or how == "a worker", told
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
    """Of a call in a process of its own, with its workers."""
    command = [sys.executable, "-c", _MEASURED, call, str(source_bytes), str(workers)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout) / 1024


@pytest.mark.parametrize("to", [pytest.param("dcp", marks=pytest.mark.exhaustive), "safetensors"])
def test_peak_memory_is_a_few_buffers(to: str, tmp_path: Path) -> None:
    """192 MiB, half of it by strides: all processes together stay below 300 MiB."""
    rows = 192 << 20 >> 13
    torch.save({"w": torch.zeros(rows, 1024), "t": torch.zeros(1024, rows).t()}, tmp_path / "model.pt")
    call = f"dcp.convert({str(tmp_path / 'model.pt')!r}, {str(tmp_path / 'copy')!r}, to={to!r}, workers=2)"
    assert _peak_mebibytes(call, 192 << 20) < 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_peak_memory_does_not_grow_with_the_model(to: str, tmp_path: Path) -> None:
    """2 GiB take no more than 300 MiB."""
    state = {f"t{n}": torch.zeros(1 << 27) for n in range(4)}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    target = tmp_path / ("model.pt" if to == "torch" else "copy")
    call = f"dcp.convert({str(tmp_path / 'source')!r}, {str(target)!r}, to={to!r}, workers=2)"
    assert _peak_mebibytes(call, 2 << 30) < 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", [False, True])
def test_peak_memory_of_a_merge(tmp_path: Path, adapter: bool) -> None:
    """Eight sources of 192 MiB through two workers; a low-rank adapter of 4,096 by 8,192."""
    rows, columns = 12288, 8192
    save_file({"m.weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}, tmp_path / "0.safetensors")
    for number in range(1, 8):
        (tmp_path / f"{number}.safetensors").hardlink_to(tmp_path / "0.safetensors")
    sources, adapters = [str(tmp_path / f"{number}.safetensors") for number in range(8)], []
    if adapter:
        (folder := tmp_path / "lora").mkdir()
        config = {"peft_type": "LORA", "r": 128, "lora_alpha": 1}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        factors = {"A": torch.zeros(128, columns), "B": torch.zeros(rows, 128)}
        named = {f"base_model.model.m.lora_{name}.weight": value for name, value in factors.items()}
        save_file(named, folder / "adapter_model.safetensors")
        sources, adapters = sources[:1], [str(folder)]
    given = f"to='dcp', adapters={adapters!r}, accumulate='float64', workers=2"
    assert _peak_mebibytes(f"dcp.merge({sources!r}, {str(tmp_path / 'out')!r}, {given})") < 300


@pytest.mark.exhaustive
def test_peak_memory_of_a_merge_of_many_tensors(tmp_path: Path) -> None:
    """Four sources of 50,000: the process that plans and compares stays below 300 MiB."""
    names = [f"model.layers.{n // 100}.mlp.experts.{n % 100}.weight" for n in range(50_000)]
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * at, 16 * at + 16]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + np.ones(4 * len(names), "<f4").tobytes()
    (tmp_path / "0.safetensors").write_bytes(data)
    for number in range(1, 4):
        (tmp_path / f"{number}.safetensors").hardlink_to(tmp_path / "0.safetensors")
    sources = [str(tmp_path / f"{number}.safetensors") for number in range(4)]
    assert _peak_mebibytes(f"dcp.merge({sources!r}, {str(tmp_path / 'out')!r}, to='dcp')", workers=0) < 300


@pytest.mark.exhaustive
def test_a_torch_file_beyond_four_gibibytes(tmp_path: Path) -> None:
    """Entries and offsets that need zip64 are where torch looks for them; the source is sparse."""
    header = {"big": {"dtype": "U8", "shape": [5 << 30], "data_offsets": [0, 5 << 30]}}
    header["last"] = {"dtype": "U8", "shape": [3], "data_offsets": [5 << 30, (5 << 30) + 3]}
    text = json.dumps(header).encode()
    with (source := tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + (5 << 30))
        file.write(b"abc")
    dcp.convert(source, tmp_path / "large.pt", to="torch")
    loaded = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert (loaded["big"].nbytes, bytes(loaded["last"].tolist())) == (5 << 30, b"abc")
