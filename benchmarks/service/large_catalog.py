"""The large catalog of `benchmarks.service.pages`, with some checkpoints on disk.

A run of 5,000 steps, of which the compared steps are on disk; two checkpoints of 50,000 tensors; 300
checkpoints of 12 runs with 5,000 names each and with lineage; the index of a checkpoint of many ranks. Real
jobs produce the job results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch

import dcp
from dcp.server.catalog.changes import upsert_checkpoints
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.runs import sync_roots
from dcp.server.catalog.structures import StructureFacts, Tensor
from dcp.server.database.engine import Database
from dcp.server.features.lineage import add_lineage
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.geometry.strides import starts

__all__ = ["Sizes", "fill", "found_by_jobs", "numbers_of", "write_checkpoints"]

_START: Final = 1_700_000_000.0
_STEPS: Final = 5_000
_RUNS: Final = 12
_OF_RUN: Final = 25
_MADE_OF_ONE: Final = 4
_PARTS: Final = ("q", "k", "v", "o", "gate", "up", "down", "norm", "bias", "scale")
_ROWS: Final = (16, 4, 4, 16, 24, 24, 24, 1, 1, 1)
"""Rows of a rank's box of such a tensor; each row has 256 columns."""
_COLUMNS: Final = 256
_JOB_SECONDS: Final = 1_200


@dataclass(frozen=True, slots=True)
class Sizes:
    """Each of ``ranks`` wrote ``tensors``; one checkpoint has ``wide`` tensors; ``points`` steps with
    ``layers`` layers of the long run are on disk."""

    ranks: int = 1024
    tensors: int = 5_000
    wide: int = 50_000
    points: int = 200
    layers: int = 600


def names_of(count: int, variant: int = 0) -> list[str]:
    """Return tensor names, ten per layer; each variant has other names."""
    end = f"_{variant}" if variant else ""
    return [f"model.layers.{number // 10}.{_PARTS[number % 10]}.weight{end}" for number in range(count)]


# -- rows of the catalog -------------------------------------------------------------------------------------


def fill(database: Database) -> None:
    """Write the rows that need no files."""
    database.transact(lambda connection: sync_roots(connection, {"main": "./main", "archive": "./archive"}))
    small = _structure(260)
    _put(database, (_facts("main", "long/run", step, small) for step in range(1, _STEPS + 1)))
    for run in range(_RUNS):
        shared = _structure(5_000, run + 1)
        _put(
            database,
            (_facts("archive", f"team/run-{run}", 1000 * step, shared) for step in range(1, _OF_RUN + 1)),
        )


def _structure(count: int, variant: int = 0) -> StructureFacts:
    return StructureFacts.of(
        Tensor(name, "tensor", "bfloat16", (64, 64), 8192) for name in names_of(count, variant)
    )


def _facts(root: str, run: str, step: int, structure: StructureFacts) -> CheckpointFacts:
    return CheckpointFacts(
        root=root,
        key=f"{run}/step-{step:08}",
        format="dcp",
        observed_seconds=_START,
        committed_seconds=_START + step,
        step=step,
        save_id=f"{run}-{step}",
        fingerprint=f"{run}-{step}"[:64],
        bytes=10**9 + step,
        structure=structure,
        metrics={"loss": 8.0 / step},
        world_size=8,
    )


def _put(database: Database, facts: Iterable[CheckpointFacts]) -> None:
    rows = list(facts)
    for begin in range(0, len(rows), 500):
        some = rows[begin : begin + 500]
        database.transact(lambda connection, some=some: upsert_checkpoints(connection, some))  # type: ignore[misc]


# -- checkpoints on disk -------------------------------------------------------------------------------------


def write_checkpoints(main: Path, sizes: Sizes) -> None:
    """Write the checkpoints of the root "main"."""
    write_sharded(main / "huge/step-00000001", sizes.ranks, sizes.tensors)
    torch.manual_seed(0)
    wide = {name: torch.randn(64) for name in names_of(sizes.wide)}
    wide["model.embed.weight"] = torch.randn(2048, 4096)
    for step in (1, 2):
        dcp.save(wide, checkpoint_id=main / f"wide/run/step-{step:08}", no_dist=True)
        for number, tensor in enumerate(wide.values()):
            tensor.mul_(1 + 10.0 ** -(1 + number % 7))  # different changes, shown as different colours
    state = {f"model.layers.{number}.weight": torch.randn(16) for number in range(sizes.layers)}
    for step in _steps(sizes):
        for number, tensor in enumerate(state.values()):
            tensor.add_(torch.randn(16), alpha=(1 + number % 50) / (step + 100))
        dcp.save(state, checkpoint_id=main / f"long/run/step-{step:08}", no_dist=True)


def _steps(sizes: Sizes) -> list[int]:
    """Return the steps of the long run that the job compares, as far apart as possible."""
    return [1 + place * (_STEPS - 1) // (sizes.points - 1) for place in range(sizes.points)]


def write_sharded(folder: Path, ranks: int, tensors: int) -> None:
    """Write the index of a checkpoint of ``ranks``, each with its part of all tensors, without data."""
    folder.mkdir(parents=True)
    codes = np.array(
        [dtypes.BY_NAME["float32" if n % 10 > 6 else "bfloat16"].code for n in range(tensors)], np.uint8
    )
    rows = np.resize(_ROWS, tensors).astype(np.int64)
    lengths = rows * _COLUMNS * np.where(np.arange(tensors) % 10 > 6, 4, 2)
    records = lengths + 256
    offsets = np.cumsum(records) - records
    tensor, rank = np.repeat(np.arange(tensors), ranks), np.tile(np.arange(ranks), tensors)
    sizes = np.stack([rows[tensor], np.full(len(tensor), _COLUMNS)], 1)
    index = CheckpointIndex(
        "dcp",
        fqns=names_of(tensors),
        dtype_codes=codes,
        shape_start=starts([2] * tensors),
        shape_values=np.stack([rows * ranks, np.full(tensors, _COLUMNS)], 1).reshape(-1),
        requires_grad=np.zeros(tensors, np.uint8),
        chunk_start=np.arange(tensors + 1) * ranks,
        chunk_offsets=np.stack([rank * rows[tensor], np.zeros_like(rank)], 1).reshape(-1),
        chunk_sizes=sizes.reshape(-1),
        chunk_files=rank,
        record_offsets=offsets[tensor],
        record_lengths=records[tensor],
        payload_offsets=offsets[tensor] + 192,
        payload_lengths=lengths[tensor],
        crc_start=np.arange(len(tensor) + 1),
        crcs=np.random.default_rng(1).integers(0, 1 << 32, len(tensor), dtype=np.uint32),
        files=[f"__{number}_0.0badc0de.distcp" for number in range(ranks)],
        file_sizes=np.full(ranks, records.sum()),
        planner_data={name: tuple(name.split(".")) for name in names_of(tensors)},
        provenance={
            "world_size": ranks,
            "rank_seconds": [{"plan": 0.1, "write": 2.0 + 3 * (number == 7)} for number in range(ranks)],
        },
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(index))
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        with (folder / name).open("wb") as file:
            file.truncate(size)


# -- registration and results of jobs ------------------------------------------------------------------------


def numbers_of(client: httpx.Client, database: Database, sizes: Sizes) -> dict[str, int]:
    """Register the checkpoints on disk; return the ids in addresses of pages, by name."""
    registered = {
        key: _registered(client, key)
        for key in ("huge/step-00000001", "wide/run/step-00000001", "wide/run/step-00000002")
    }
    for step in _steps(sizes):
        _registered(client, f"long/run/step-{step:08}")
    sharded, before, wide = registered.values()
    return {
        "sharded": sharded,
        "before": before,
        "wide": wide,
        "long": _looked_up(client, "main", "long/run/step-00000001")["run_id"],
        "origin": _made_of_one_another(client, database),
    }


def _registered(client: httpx.Client, key: str) -> int:
    body = {"root": "main", "key": key}
    return int(client.post("/api/v1/checkpoints", json=body, timeout=600).raise_for_status().json()["id"])


def _looked_up(client: httpx.Client, root: str, key: str) -> dict[str, Any]:
    answer = client.get("/api/v1/checkpoints/lookup", params={"root": root, "key": key})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def _made_of_one_another(client: httpx.Client, database: Database) -> int:
    """Write a lineage tree of all checkpoints of the runs; return the id of the root of the tree."""
    first = int(_looked_up(client, "archive", "team/run-0/step-00001000")["id"])
    with database.write() as connection:
        for number in range(1, _RUNS * _OF_RUN):
            add_lineage(connection, first + number, first + (number - 1) // _MADE_OF_ONE)
    return first


def found_by_jobs(client: httpx.Client, numbers: Mapping[str, int], sizes: Sizes) -> dict[str, float]:
    """Run the jobs of the displayed results (differences, drift, statistics); return their seconds."""
    before, wide = numbers["before"], numbers["wide"]
    jobs = {
        "diff": {"a": before, "b": wide},
        "drift": {"run_id": numbers["long"], "points": sizes.points},
        "stats": {"checkpoint_id": wide},
    }
    return {kind: _done(client, kind, params) for kind, params in jobs.items()}


def _done(client: httpx.Client, kind: str, params: Mapping[str, Any]) -> float:
    begin = time.monotonic()
    job = client.post("/api/v1/jobs", json={"kind": kind, "params": params}).raise_for_status().json()
    while job["state"] not in ("succeeded", "failed", "cancelled"):
        if time.monotonic() > begin + _JOB_SECONDS:
            raise RuntimeError(f"{kind} is not done after {_JOB_SECONDS} s")
        time.sleep(0.5)
        job = client.get(f"/api/v1/jobs/{job['id']}").raise_for_status().json()
    if job["state"] != "succeeded":
        raise RuntimeError(f"{kind}: {json.dumps(job['error'])}")
    return time.monotonic() - begin
