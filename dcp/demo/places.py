"""Places of the demo's checkpoints (local folders, or prefixes on an S3 server), and its training processes.

Both kinds of places use the same stores, except for leftovers of killed saves. Waits are bounded, and all
processes are ended.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dcp.demo.s3_server import S3Server
from dcp.inspection.verification import verify
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.opening import has_checkpoint, open_index
from dcp.storage.stores.base import Store
from dcp.storage.stores.opening import OpenWith, open_parent_folder

TRAINING = "dcp.demo.train"
"""Module imported on use, because the import of torch takes seconds."""
LONGEST_SECONDS = 300.0
"""Timeout of a job or command."""
_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
_LARGEST_FILE_BYTES = 256 << 20


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step; zero-padded for sorting."""
    return f"step-{step:08d}"


def newest_checkpoint(root: str | Path, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Return the newest committed and verified checkpoint in ``root``, as found by a restarted job."""
    place = open_parent_folder(root, open_store=OpenWith(storage_options))
    for name in sorted(place.names(), reverse=True):
        store = place.store(name)
        if not has_checkpoint(store):
            continue
        try:
            if verify(store.url, storage_options=storage_options).ok:
                return name
        except CheckpointError:
            continue
    return None


class Place:
    """Checkpoints by job and step, below a path or URL ``base``.

    ``storage_options`` are for this process; jobs use ``environment``. ``leftover``: name of remains of a
    killed save, in the plural; ``about_leftovers``: their description; ``about_clearing``:
    their fate in the next save. ``state_of_killed``: state in `dcp ls` of a step whose save was killed;
    None if not listed.
    """

    storage_options: dict[str, Any] | None = None
    environment: Mapping[str, str] = {}
    leftover: str
    about_leftovers: str
    about_clearing: str
    state_of_killed: str | None

    def __init__(self, base: str) -> None:
        self.base = base

    def checkpoint(self, job: str, step: int) -> str:
        """Return the id of a checkpoint."""
        return f"{self.base}/{job}/{checkpoint_name(step)}"

    def shown(self, path: str) -> str:
        """Return a path below ``base`` as typed by a user."""
        return f"{self.base}/{path}"

    def leftovers(self, job: str, step: int) -> dict[str, int]:
        """Return sizes by name of the data files that a killed save left."""
        return self.data_files(job, step)

    def store(self, job: str, step: int) -> Store:
        """Open the store of a checkpoint."""
        return OpenWith(self.storage_options)(self.checkpoint(job, step))

    def is_committed(self, job: str, step: int) -> bool:
        """Return True if the checkpoint exists."""
        return has_checkpoint(self.store(job, step))

    def newest(self, job: str) -> str | None:
        """See `newest_checkpoint`."""
        return newest_checkpoint(f"{self.base}/{job}", self.storage_options)

    def findings(self, job: str, step: int) -> list[str]:
        """Return the findings of `verify` as text."""
        report = verify(self.checkpoint(job, step), storage_options=self.storage_options)
        return [finding.message for finding in report.findings]

    def data_files(self, job: str, step: int) -> dict[str, int]:
        """Return sizes by name of the visible data files."""
        files = self.store(job, step).list()
        return {info.name: info.size_bytes for info in files if info.name.endswith(".distcp")}

    def copy(self, job: str, step: int, to: str) -> None:
        """Copy a checkpoint to the job ``to``, commit objects last."""
        source, target = self.store(job, step), self.store(to, step)
        target.make_root()
        names = [info.name for info in source.list()]
        for name in sorted(names, key=is_commit_object):
            _write(target, name, source.read(name, limit_bytes=_LARGEST_FILE_BYTES))

    def flip_bit(self, job: str, step: int) -> str:
        """Flip a bit in the middle of the longest payload; return the tensor's name."""
        store = self.store(job, step)
        index = open_index(store)
        chunk = int(index.payload_lengths.argmax())
        name = index.files[int(index.chunk_files[chunk])]
        data = bytearray(store.read(name, limit_bytes=_LARGEST_FILE_BYTES))
        data[int(index.payload_offsets[chunk] + index.payload_lengths[chunk] // 2)] ^= 0x10
        store.delete(name)
        _write(store, name, bytes(data))
        return index.fqns[int(index.chunk_start.searchsorted(chunk, side="right")) - 1]


def _write(store: Store, name: str, data: bytes) -> None:
    if is_commit_object(name):
        store.publish(name, data, durable=False)
        return
    with store.create(name, durable=False, expected_bytes=len(data)) as file:
        file.write(data)


class FolderPlace(Place):
    """Place in local folders."""

    leftover = "files are half written"
    about_leftovers = "half-written files"
    about_clearing = "in the folder with the files of the killed save"
    state_of_killed = "incomplete"

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def shown(self, path: str) -> str:
        """Return a path relative to the working directory of commands."""
        return path


class BucketPlace(Place):
    """Place in the bucket of an S3 server."""

    leftover = "uploads are incomplete"
    about_leftovers = "incomplete multipart uploads, and no object,"
    about_clearing = "under the prefix with the uploads of the killed save"
    state_of_killed = None

    def __init__(self, server: S3Server) -> None:
        super().__init__(f"s3://{server.bucket}")
        self._server = server
        self.storage_options = server.storage_options
        self.environment = server.environment

    def leftovers(self, job: str, step: int) -> dict[str, int]:
        """Return unfinished multipart uploads with their sizes."""
        prefix, bucket, found = f"{job}/{checkpoint_name(step)}/", self._server.bucket, {}
        with contextlib.closing(self._server.client()) as client:
            for upload in client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", []):
                where = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                parts = client.list_parts(**where).get("Parts", [])
                found[upload["Key"].removeprefix(prefix)] = sum(part["Size"] for part in parts)
        return found


# -- processes -----------------------------------------------------------------------------------------------


class DemoError(Exception):
    """A required job or command failed."""


@dataclass
class JobOutcome:
    """Results of a training job: exit status, losses by step, and each rank's random probes by step."""

    exit_code: int | None
    results: Path
    losses: dict[int, float]
    looks: dict[int, list[float]]

    def digests(self, name: str) -> dict[str, str]:
        """Read the digests of ``saved-STEP`` or ``loaded-STEP``; empty if the job ended before."""
        path = self.results / f"{name}.json"
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return found


def environ_of(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process, without variables of another launcher."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("TORCHELASTIC_", "PET_"))
    }
    # One thread per rank: the machine has few cores, and sums must not depend on their number.
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    given = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part]
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *given])
    if Path("/sys/class/net/lo").exists():
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept | dict(extra)


def run_or_kill(launch: Any, job: Any, ranks: int, environment: dict[str, str], log: Path) -> int | None:
    """Run the launcher of a job until the end, or until all ranks have stopped to be killed."""
    alive, held = os.pipe()
    details = (job, ranks, environment, log)
    process = multiprocessing.get_context("fork").Process(target=launch, args=details)
    process.start()
    try:
        os.close(held)  # held by the launcher and its ranks, not by writer processes
        give_up = time.monotonic() + LONGEST_SECONDS
        while process.exitcode is None and len([*job.results.glob("stopped-*")]) < ranks:
            process.join(_POLL_SECONDS)
            if time.monotonic() > give_up:
                name = job.results.name
                raise DemoError(f"a job did not end within {LONGEST_SECONDS:g} seconds: {name}")
    finally:
        _end(process, alive)
    return process.exitcode


def _end(process: BaseProcess, alive: int) -> None:
    """Kill the launcher and its ranks; only writer processes survive."""
    if process.pid:
        with contextlib.suppress(ProcessLookupError):  # no process group yet, or all processes have ended
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    if not select.select([alive], [], [], _END_SECONDS)[0]:
        raise DemoError(f"processes of a killed job are still there after {_END_SECONDS:g} seconds")
    os.close(alive)
