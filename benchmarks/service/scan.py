"""K3: scan a root of many checkpoints into an empty catalog, and scan again; the cost of registration for
a save.

`python -m benchmarks.service.scan`. Each checkpoint is a real manifest with `.metadata` of a model of 291
tensors on 8 ranks, without data files, which a scan does not read. Everything is in the page cache. The limit
is reading the same files with their CRC.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import SecretStr

from dcp.manager.catalog import CatalogRegistration, Registrar
from dcp.server.core.roots import Roots
from dcp.server.core.settings import RootSettings, Settings
from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.features.scan.scanner import scan_root
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.geometry.strides import starts

__all__ = ["main", "measure"]

_RANKS: Final = 8
_COMMITTED_SECONDS: Final = 1_700_000_000.0
_PHASES: Final = ("blocked", "staging", "local_plan", "digests", "global_plan", "plan", "write")
_NOTES: Final = 500


def _index(tensors: int) -> CheckpointIndex:
    """Return an index of ``tensors`` matrices in bfloat16, each sharded by rows over the ranks."""
    chunks, rows, columns = tensors * _RANKS, 512, 4096
    size = rows // _RANKS * columns * 2
    ranks = np.tile(np.arange(_RANKS, dtype=np.int64), tensors)
    places = np.repeat(np.arange(tensors, dtype=np.int64), _RANKS) * (size + 512)
    boxes = np.stack([ranks * (rows // _RANKS), np.zeros(chunks, np.int64)], axis=1).ravel()
    return CheckpointIndex(
        format="dcp",
        fqns=[f"model.layers.{number // 9}.part_{number % 9}.weight" for number in range(tensors)],
        dtype_codes=np.full(tensors, 4, dtype=np.uint8),
        shape_start=starts([2] * tensors),
        shape_values=np.tile(np.array([rows, columns], dtype=np.int64), tensors),
        requires_grad=np.zeros(tensors, dtype=np.uint8),
        chunk_start=np.arange(tensors + 1, dtype=np.int64) * _RANKS,
        chunk_offsets=boxes,
        chunk_sizes=np.tile(np.array([rows // _RANKS, columns], dtype=np.int64), chunks),
        chunk_files=ranks,
        record_offsets=places,
        record_lengths=np.full(chunks, size + 512, dtype=np.int64),
        payload_offsets=places + 448,
        payload_lengths=np.full(chunks, size, dtype=np.int64),
        crc_start=np.arange(chunks + 1, dtype=np.int64),
        crcs=np.arange(chunks, dtype=np.uint32) * np.uint32(2_654_435_761),
        files=[f"__{rank}_0.0000abcd.distcp" for rank in range(_RANKS)],
        file_sizes=np.full(_RANKS, (size + 512) * tensors, dtype=np.int64),
    )


def _write_root(root: Path, checkpoints: int, runs: int, tensors: int) -> None:
    index = _index(tensors)
    seconds = [dict.fromkeys(_PHASES, 0.25 + rank) for rank in range(_RANKS)]
    for number in range(checkpoints):
        folder = root / f"run-{number % runs:05d}" / f"step-{number // runs:08d}"
        folder.mkdir(parents=True)
        provenance = {
            "save_id": f"{number:08x}",
            "time": _COMMITTED_SECONDS + number,
            "world_size": _RANKS,
            "torch_version": "2.13.0",
            "dcphub_version": "0.2.0",
            "rank_seconds": seconds,
        }
        user = {"step": number // runs, "run": f"run {number % runs}", "metrics": {"loss": 1 / (1 + number)}}
        changed = replace(index, provenance=provenance, user=user)
        metadata = encode_torch_metadata(changed, checkpoint_id=str(folder), save_id=f"{number:08x}")
        changed = replace(changed, torch_metadata_crc=crc32(metadata))
        for name, data in ((METADATA_NAME, metadata), (MANIFEST_NAME, encode_manifest(changed))):
            (folder / name).write_bytes(data)
            os.utime(folder / name, (_COMMITTED_SECONDS, _COMMITTED_SECONDS))


def _read_only(root: Path) -> float:
    """Return seconds to read all files with their checksums."""
    begun = time.perf_counter()
    for run in os.scandir(root):
        for step in os.scandir(run.path):
            for name in (METADATA_NAME, MANIFEST_NAME):
                crc32(Path(step.path, name).read_bytes())
    return time.perf_counter() - begun


def _registering(folder: Path) -> dict[str, float]:
    """Return microseconds until a record is queued while no service responds: the wait of a save."""
    options = CatalogRegistration("http://127.0.0.1:9", spool=folder, close_seconds=0.0)
    registrar = Registrar(options, "s3://bucket/run", lambda step: f"step-{step:08d}")
    taken = []
    for step in range(_NOTES):
        begun = time.perf_counter()
        registrar.tell(f"step-{step:08d}", step, save_id="0000abcd")
        taken.append(time.perf_counter() - begun)
        time.sleep(0.002)
    registrar.close()
    taken.sort()
    return {"median": taken[len(taken) // 2] * 1e6, "p99": taken[len(taken) * 99 // 100] * 1e6}


def measure(
    checkpoints: int, runs: int, tensors: int, rounds: int, folder: Path, url: str | None
) -> dict[str, Any]:
    """Return all figures; ``url`` is an empty database, or None for a new SQLite file in each round."""
    root = folder / "root"
    _write_root(root, checkpoints, runs, tensors)
    roots = Roots({"main": RootSettings(url=str(root), scan_seconds=0)})
    limit = min(_read_only(root) for _ in range(2))
    first: list[float] = []
    cpu: list[float] = []
    again: list[float] = []
    for number in range(1 if url else rounds):
        settings = Settings(database_url=SecretStr(url or f"sqlite:///{folder / f'{number}.sqlite'}"))
        database = Database(settings.database_url.get_secret_value())
        upgrade(database)
        for into in (first, again):
            begun, used = time.perf_counter(), time.process_time()
            report = scan_root(database, roots, "main")
            into.append(time.perf_counter() - begun)
            if into is first:
                cpu.append(time.process_time() - used)
                assert report.new == checkpoints, report
            else:
                assert (report.found, report.opened) == (checkpoints, 0), report
        database.close()
    return {
        "checkpoints": checkpoints,
        "runs": runs,
        "tensors": tensors,
        "manifest_bytes": next(root.rglob(MANIFEST_NAME)).stat().st_size,
        "metadata_bytes": next(root.rglob(METADATA_NAME)).stat().st_size,
        "inserted_per_second": checkpoints / statistics.median(first),
        "inserted_per_cpu_second": checkpoints / statistics.median(cpu),
        "rescanned_per_second": checkpoints / statistics.median(again),
        "rescan_seconds": statistics.median(again),
        "read_only_per_second": checkpoints / limit,
        "register_microseconds": _registering(folder / "spool"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print the figures as JSON, also to a file if named."""
    parser = argparse.ArgumentParser("python -m benchmarks.service.scan", description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=10_000, help="%(default)s")
    parser.add_argument("--runs", type=int, default=20, help="%(default)s")
    parser.add_argument("--tensors", type=int, default=291, help="tensors per checkpoint: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--database-url", default=None, help="an empty PostgreSQL database instead of SQLite")
    parser.add_argument("--tmp", type=Path, default=None, help="temporary folder, removed at the end")
    parser.add_argument("--out", type=Path, default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.tmp) as name:
        found = measure(
            options.checkpoints,
            options.runs,
            options.tensors,
            options.rounds,
            Path(name),
            options.database_url,
        )
    text = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
