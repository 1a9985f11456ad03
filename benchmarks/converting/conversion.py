"""C1: convert 2 GiB sharded by four ranks; each conversion runs in its own process for its peak memory.

Also: stack and fuse 2 GiB of experts by a weight map, add up eight files of 1 GiB, and average four models
of 1 GiB as mergekit does.

Seconds are those of the call and the fsync of its output, without imports. Peaks include child processes. The
limit is a loop that reads 16 MiB, writes them, and syncs at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.converting.mixture import save_mixture
from benchmarks.converting.soup import save_models, save_soup
from benchmarks.machine import page_cache
from benchmarks.machine.process_tree import descendants
from benchmarks.processes import BenchmarkError, Progress
from benchmarks.rounds import Measurement, rotated
from benchmarks.targets import Promise, Row, Spread, ratios

__all__ = [
    "CASES",
    "MERGEKIT",
    "SAVING_RANKS",
    "conversion_rows",
    "measure_conversion",
    "save_for_conversion",
]

SAVING_RANKS = 4
WORKLOAD = "C1"
_SCALE = 2.0
_SETTLE_SECONDS = 600
MERGEKIT = "mergekit"

CASES: dict[str, tuple[str, str]] = {
    "dcp to torch": ("dcp", "dcp_to_torch_save"),
    "torch to dcp": ("torch", "torch_save_to_dcp"),
    "dcp to safetensors": ("dcp", "consolidate_safetensors_files"),
    "experts stacked to safetensors": ("mixture", "save_pretrained"),
    "eight merged to safetensors": ("soup", "state dicts added"),
    "four averaged to safetensors": ("models", MERGEKIT),
}
"""The source of each conversion, and the contender of torch, transformers or mergekit."""

_SOURCES = {"torch": "torch.pt", "dcp": "dcp", "mixture": "mixture", "soup": "soup", "models": "models"}


def save_for_conversion(rank: int, world_size: int, progress: Progress, scale: float, folder: Path) -> None:
    """Save the sources: dcphub's checkpoint on four ranks, and the shards of torch's Hugging Face writer."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as stock_save

    from benchmarks.sides import OURS
    from benchmarks.workloads import build_state

    state = build_state("W1", scale * _SCALE, rank=rank, world_size=world_size)
    progress("saving the source")
    OURS.save(state.state_dict, folder / "dcp", True)
    progress("saving it as torch shards safetensors")
    flat = {f"{name}": tensor for name, tensor in _flat(state.state_dict)}
    writer = HuggingFaceStorageWriter(path=str(folder / "shards"), save_distributed=True)
    stock_save(flat, storage_writer=writer)
    if rank == 0:
        from dcp.conversion.run import convert

        progress("saving a mixture of experts")
        save_mixture(folder / "mixture", scale * (2 << 30))
        progress("saving eight to be added up")
        save_soup(folder / "soup", scale * (1 << 30))
        progress("saving four models to be averaged")
        save_models(folder / "models", scale * (1 << 30))
        progress("making the torch.save file")
        convert(folder / "dcp", folder / "torch.pt", to="torch")


def _flat(value: object, name: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [
            pair for key, item in value.items() for pair in _flat(item, f"{name}.{key}" if name else str(key))
        ]
    return [(name, value)]


# -- the rounds ----------------------------------------------------------------------------------------------


def measure_conversion(
    case: str, folder: Path, rounds: int, progress: Progress, mergekit: str = ""
) -> tuple[Measurement, dict[str, float]]:
    """Run the rounds of all contenders of a case from the page cache; return the largest peak of each in
    MiB. ``mergekit`` is the Python of an environment with mergekit."""
    kind, stock = CASES[case]
    source = folder / _SOURCES[kind]
    to = case.rpartition(" ")[2]
    size = sum(f.stat().st_size for f in ([source] if source.is_file() else page_cache.data_files(source)))
    result = Measurement(WORKLOAD, SAVING_RANKS, case, size, 0)
    peaks: dict[str, float] = {}
    for number in range(rounds):
        for contender in rotated(["ours", stock, "loop"], number):
            inputs = page_cache.data_files(folder / "shards") if contender.startswith("consolidate") else []
            page_cache.warm(inputs or ([source] if source.is_file() else page_cache.data_files(source)))
            seconds, peak = _run(contender, to, source, folder / "out", mergekit)
            result.samples.setdefault("stock" if contender == stock else contender, []).append(seconds)
            name = "stock" if contender == stock else contender
            peaks[name] = max(peaks.get(name, 0.0), peak)
            progress(f"{case}, round {number + 1}/{rounds}: {contender} {seconds:.2f} s, {peak:.0f} MiB")
    return result, peaks


def _run(contender: str, to: str, source: Path, folder: Path, mergekit: str) -> tuple[float, float]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    target = folder / {"torch": "model.pt", "dcp": "copy", "safetensors": "model"}[to]
    command = [sys.executable, "-m", "benchmarks.converting.side", contender, to, str(source), str(target)]
    if contender == MERGEKIT:
        script = Path(__file__).with_name("mergekit_side.py")
        command = [mergekit, str(script), str(source), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = _watch(process)
    output = process.communicate(timeout=_SETTLE_SECONDS)[0]
    if process.returncode:
        raise BenchmarkError(f"{contender} failed with exit code {process.returncode}")
    shutil.rmtree(folder)
    return float(json.loads(output.splitlines()[-1])["seconds"]), peak


def _watch(process: subprocess.Popen[str]) -> float:
    """Return the peak resident MiB of the process and its descendants; shared pages count once per
    process."""
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            peaks[pid] = max(peaks.get(pid, 0), _high_water_kibibytes(pid))
        time.sleep(0.02)
    return sum(peaks.values()) / 1024


def _high_water_kibibytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def conversion_rows(measured: Measurement, peaks: dict[str, float]) -> list[Row]:
    """Return the rows of throughput beside torch and the loop, and of peak memory."""
    ours, gigabytes = measured.samples["ours"], measured.size_bytes / 1e9
    speed = 1.0 if measured.operation.endswith("safetensors") else 3.0
    row = Row(
        WORKLOAD,
        measured.ranks,
        measured.operation,
        gigabytes,
        Spread.of(ours),
        stock=Spread.of(measured.samples["stock"]),
        ratio=ratios(measured.samples["stock"], ours),
        limit_name="loop of 16 MiB",
        limit=Spread.of(measured.samples["loop"]),
        of_limit=ratios(measured.samples["loop"], ours).median,
    )
    row.judge([Promise("ratio", speed), Promise("of_limit", 0.6)])
    nothing = Spread(float("nan"), float("nan"), float("nan"))
    memory = Row(
        WORKLOAD,
        measured.ranks,
        f"{measured.operation}, peak memory",
        gigabytes,
        nothing,
        mebibytes=peaks["ours"],
        stock_mebibytes=peaks["stock"],
    )
    return [row, memory.judge([Promise("mebibytes", 300)])]
