"""Places where the jobs of one demo save, folders of this machine or prefixes on an S3 server; and the
processes that work there.

Everything but what a killed save leaves behind is the same on both, because it goes through the stores.
Waits are bounded, and all processes are ended.
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
"""Imported on use, because it imports torch, which takes seconds, and which other commands do without."""
LONGEST_SECONDS = 300.0
"""Time that a job or command may take."""
_POLL_SECONDS = 0.1
_END_SECONDS = 20.0
_LARGEST_FILE_BYTES = 256 << 20


def checkpoint_name(step: int) -> str:
    """Name the folder of a step's checkpoint; the digits make names sort as steps do."""
    return f"step-{step:08d}"


def newest_checkpoint(root: str | Path, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Name the newest committed checkpoint in ``root`` that verifies, as a job that starts again finds it."""
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
    """Checkpoints by job and step, below ``base``: a path or a URL.

    ``storage_options`` are those by which this process reaches them; jobs go by ``environment``, as users'
    jobs do. ``leftover``: the leftovers of a killed save, in the plural; ``about_leftovers``: their place,
    for a heading; ``about_clearing``: their fate in the next save of the step. ``state_of_killed``: the word
    of `dcp ls` for a step whose save was killed; None if it does not list it.
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
        """Give the id of a checkpoint."""
        return f"{self.base}/{job}/{checkpoint_name(step)}"

    def shown(self, path: str) -> str:
        """Give what is below ``base`` as a user would type it."""
        return f"{self.base}/{path}"

    def leftovers(self, job: str, step: int) -> dict[str, int]:
        """Give bytes by name of what a killed save left of its data files."""
        return self.data_files(job, step)

    def store(self, job: str, step: int) -> Store:
        """Open a checkpoint's store."""
        return OpenWith(self.storage_options)(self.checkpoint(job, step))

    def is_committed(self, job: str, step: int) -> bool:
        """Test whether there is a checkpoint."""
        return has_checkpoint(self.store(job, step))

    def newest(self, job: str) -> str | None:
        """See `newest_checkpoint`."""
        return newest_checkpoint(f"{self.base}/{job}", self.storage_options)

    def findings(self, job: str, step: int) -> list[str]:
        """Give the findings of `verify`, in words."""
        report = verify(self.checkpoint(job, step), storage_options=self.storage_options)
        return [finding.message for finding in report.findings]

    def data_files(self, job: str, step: int) -> dict[str, int]:
        """Give bytes by name of the data files that readers can see."""
        files = self.store(job, step).list()
        return {info.name: info.size_bytes for info in files if info.name.endswith(".distcp")}

    def copy(self, job: str, step: int, to: str) -> None:
        """Copy a checkpoint to one of the job ``to``; the files that commit it last."""
        source, target = self.store(job, step), self.store(to, step)
        target.make_root()
        names = [info.name for info in source.list()]
        for name in sorted(names, key=is_commit_object):
            _write(target, name, source.read(name, limit_bytes=_LARGEST_FILE_BYTES))

    def flip_bit(self, job: str, step: int) -> str:
        """Flip one bit in the middle of the longest payload, sizes and headers intact; name its tensor."""
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
    """Folders below one on this machine."""

    leftover = "files are half written"
    about_leftovers = "its files"
    about_clearing = "into the folder where the killed one left its halves"
    state_of_killed = "incomplete"

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def shown(self, path: str) -> str:
        """Give a path relative to where the demo types its commands."""
        return path


class BucketPlace(Place):
    """Prefixes in the bucket of an S3 server."""

    leftover = "uploads are half done"
    about_leftovers = "no object, but uploads that will never be completed"
    about_clearing = "under the prefix where the killed one left its uploads"
    state_of_killed = None

    def __init__(self, server: S3Server) -> None:
        super().__init__(f"s3://{server.bucket}")
        self._server = server
        self.storage_options = server.storage_options
        self.environment = server.environment

    def leftovers(self, job: str, step: int) -> dict[str, int]:
        """Give uploads in parts that were begun and not completed, with the bytes that the service has."""
        prefix, bucket, found = f"{job}/{checkpoint_name(step)}/", self._server.bucket, {}
        with contextlib.closing(self._server.client()) as client:
            for upload in client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", []):
                where = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                parts = client.list_parts(**where).get("Parts", [])
                found[upload["Key"].removeprefix(prefix)] = sum(part["Size"] for part in parts)
        return found


# -- processes -----------------------------------------------------------------------------------------------


class DemoError(Exception):
    """A job or command that the rest of the demo needs has failed."""


@dataclass
class JobOutcome:
    """Results of a training job: exit status, losses by step, each rank's passing looks by step."""

    exit_code: int | None
    results: Path
    losses: dict[int, float]
    looks: dict[int, list[float]]

    def digests(self, name: str) -> dict[str, str]:
        """Read the digests noted as ``saved-STEP`` or ``loaded-STEP``; none if the job ended before."""
        path = self.results / f"{name}.json"
        found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return found


def environ_of(extra: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a process: without what another launcher may have set in this one's."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("TORCHELASTIC_", "PET_"))
    }
    # One thread a rank: two cores, and sums whose order does not depend on the machine's.
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    given = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part]
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *given])
    if Path("/sys/class/net/lo").exists():
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept | dict(extra)


def run_or_kill(launch: Any, job: Any, ranks: int, environment: dict[str, str], log: Path) -> int | None:
    """Run the launcher of a job until it has ended, or until all of its ranks have stopped to be killed."""
    alive, held = os.pipe()
    details = (job, ranks, environment, log)
    process = multiprocessing.get_context("fork").Process(target=launch, args=details)
    process.start()
    try:
        os.close(held)  # the launcher and its ranks have it as long as they live; writer processes do not
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
    """Kill the launcher and its ranks: no process of the job outlives it, but for writer processes."""
    if process.pid:
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet, or all have ended
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    if not select.select([alive], [], [], _END_SECONDS)[0]:
        raise DemoError(f"processes of a killed job are still there after {_END_SECONDS:g} seconds")
    os.close(alive)
