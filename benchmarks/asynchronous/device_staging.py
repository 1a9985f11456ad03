"""Benchmark staging from an accelerator: the copy, the wait of training, and the delay of kernels.

    python -m benchmarks --only device

Without an accelerator the workload prints a message and measures nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import DefaultStager

import dcp
from benchmarks.asynchronous.sides import StartedSave
from benchmarks.processes import Progress
from benchmarks.rounds import Measurement, Sample, remove_durably, rotated, timed
from benchmarks.workloads import build_state

__all__ = ["DeviceSpec", "accelerator", "stage_from_device"]

_MATRIX_ROWS = {"cpu": 128}
_ACCELERATOR_MATRIX_ROWS = 4096
_CALIBRATION_KERNELS = 20


@dataclass(frozen=True)
class DeviceSpec:
    """A job: workload, size, device, number of rounds, folder of the checkpoints."""

    workload: str
    scale: float
    rounds: int
    folder: Path
    device: str


def accelerator() -> str | None:
    """Return the device type of the accelerator, or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def stage_from_device(rank: int, world_size: int, progress: Progress, spec: DeviceSpec) -> list[Measurement]:
    """Measure staging, the wait, and kernels that run during a save."""
    with closing(_StagingRounds(spec, progress)) as rounds:
        return rounds.run()


class _StagingRounds:
    def __init__(self, spec: DeviceSpec, progress: Progress) -> None:
        self._spec = spec
        self._progress = progress
        self._device = torch.device(spec.device)
        self._on_accelerator = self._device.type != "cpu"
        state = build_state(spec.workload, spec.scale, rank=0, world_size=1)
        self._size_bytes = state.size_bytes
        self._tensors = len(state.by_fqn)
        self._state: dict[str, Any] = _moved(state.state_dict, self._device)
        self._flat = torch.ones(self._size_bytes, dtype=torch.uint8, device=self._device)
        self._host = torch.ones(self._size_bytes, dtype=torch.uint8, pin_memory=self._on_accelerator)
        rows = _MATRIX_ROWS.get(self._device.type, _ACCELERATOR_MATRIX_ROWS)
        self._matrix = torch.rand(rows, rows, device=self._device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._matrix)
        # Stock's defaults: pinned, shared, asynchronous. They raise without an accelerator.
        self._stock_stager = DefaultStager() if self._on_accelerator else None
        self._saves = 0
        self._kernels = _CALIBRATION_KERNELS

    def run(self) -> list[Measurement]:
        """Save once with each contender to allocate buffers, then run the rounds."""
        ways = self._ways()
        for name, way in ways.items():
            self._progress(f"warming up {name}")
            self._save(way)
        self._calibrate()
        operations = ("stage", "async_save on device", "async_save overlapping", "kernels while staging")
        results = {operation: self._measurement(operation) for operation in operations}
        for number in range(self._spec.rounds):
            results["stage"].note("device_to_host", timed(self._copy_to_host))
            results["kernels while staging"].note("kernels_alone", timed(self._run_kernels))
            for name in rotated(list(ways), number):
                self._round(name, ways[name], results)
            staged = results["stage"].samples["ours"][-1]
            self._progress(f"round {number + 1}/{self._spec.rounds}: ours staged in {staged:.4f} s")
        for result in results.values():
            result.facts |= {"device": self._device_name(), "kernels": self._kernels}
        return list(results.values())

    def close(self) -> None:
        """Release stock's buffers."""
        if self._stock_stager is not None:
            self._stock_stager.close()

    def _ways(self) -> dict[str, Callable[[Path], Any]]:
        ways: dict[str, Callable[[Path], Any]] = {
            "ours": lambda folder: dcp.async_save(self._state, checkpoint_id=folder, no_dist=True),
            "ours_overlap": lambda folder: dcp.async_save(
                self._state, checkpoint_id=folder, no_dist=True, overlap=True
            ),
            "stock": lambda folder: stock.async_save(self._state, checkpoint_id=str(folder), no_dist=True),
        }
        if self._stock_stager is not None:
            ways["stock_pinned"] = lambda folder: stock.async_save(
                self._state, checkpoint_id=str(folder), no_dist=True, async_stager=self._stock_stager
            )
        return ways

    def _round(self, name: str, way: Callable[[Path], Any], results: dict[str, Measurement]) -> None:
        """Save without other work, then with kernels running."""
        returned, staged, response = self._save(way)
        overlaps = name in ("ours_overlap", "stock_pinned")
        if overlaps:
            results["async_save overlapping"].note(name, Sample(returned, 0.0))
        results["async_save on device"].note(name, Sample(staged, 0.0))
        if name.startswith("ours"):
            seconds = response.outcome.seconds["staging"]
            results["stage"].note(name, Sample(seconds, 0.0))
        else:
            results["stage"].note(name, Sample(staged, 0.0))
        if overlaps:
            results["kernels while staging"].note(name, self._kernels_beside(way))

    def _save(self, way: Callable[[Path], Any]) -> tuple[float, float, Any]:
        """Return seconds until the call returned and until the state may change, and the result of the
        call."""
        folder = self._fresh_folder()
        gc.collect()
        self._synchronize()
        begun = time.perf_counter()
        response = way(folder)
        returned = time.perf_counter() - begun
        started = StartedSave(response)
        started.wait_until_staged()
        staged = time.perf_counter() - begun
        started.wait_until_committed()
        remove_durably(folder)
        return returned, staged, response

    def _kernels_beside(self, way: Callable[[Path], Any]) -> Sample:
        """Return seconds of kernels that are launched as soon as the save call has returned."""
        folder = self._fresh_folder()
        gc.collect()
        self._synchronize()
        started = StartedSave(way(folder))
        begun = time.perf_counter()
        self._launch_kernels()
        if self._on_accelerator:
            torch.accelerator.current_stream().synchronize()
        seconds = time.perf_counter() - begun
        started.wait_until_committed()
        remove_durably(folder)
        return Sample(seconds, 0.0)

    def _calibrate(self) -> None:
        """Return the number of kernels that take about twice as long as staging."""
        self._run_kernels()
        kernel_seconds = timed(self._run_kernels).seconds / self._kernels
        copy_seconds = timed(self._copy_to_host).seconds
        self._kernels = max(1, round(2 * copy_seconds / kernel_seconds))

    def _copy_to_host(self) -> None:
        self._host.copy_(self._flat, non_blocking=True)
        self._synchronize()

    def _launch_kernels(self) -> None:
        for _ in range(self._kernels):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def _run_kernels(self) -> None:
        self._launch_kernels()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._on_accelerator:
            torch.accelerator.synchronize()

    def _measurement(self, operation: str) -> Measurement:
        return Measurement(self._spec.workload, 1, operation, self._size_bytes, self._tensors)

    def _device_name(self) -> str:
        if self._device.type == "cuda":
            return str(torch.cuda.get_device_name(self._device))
        return self._device.type

    def _fresh_folder(self) -> Path:
        self._saves += 1
        return self._spec.folder / f"save-{self._saves}"


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
