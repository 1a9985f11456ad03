"""Places where the jobs of one demo save: folders of this machine, or prefixes on an S3 server.

Everything but what a killed save leaves behind is the same on both, because it goes through the stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcp.demo.s3_server import S3Server
from dcp.inspection.verification import verify
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import has_checkpoint, open_index
from dcp.storage.stores.base import Store
from dcp.storage.stores.opening import OpenWith, open_parent_folder

__all__ = ["BucketPlace", "FolderPlace", "Place", "checkpoint_name", "newest_checkpoint"]

_LARGEST_FILE_BYTES = 256 << 20


def checkpoint_name(step: int) -> str:
    """Name the folder of a step's checkpoint; the digits make names sort as steps do."""
    return f"step-{step:08d}"


def newest_checkpoint(root: str | Path, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Name the newest committed checkpoint in ``root`` that verifies, as a job that starts again finds it."""
    opener = OpenWith(storage_options)
    place = open_parent_folder(root, open_store=opener)
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
    """Checkpoints by job and step, below ``base``: a path or a URL."""

    storage_options: dict[str, Any] | None = None
    """Options by which this process reaches them; the jobs go by `environment`, as users' jobs do."""
    environment: Mapping[str, str] = {}
    leftover: str
    """The leftovers of a killed save, in the plural."""
    about_leftovers: str
    """Their place, for a heading."""
    about_clearing: str
    """Their fate in the next save of the step."""
    state_of_killed: str | None
    """The word of `dcp ls` for a step whose save was killed; None if it does not list it."""

    def __init__(self, base: str) -> None:
        self.base = base

    def root(self, job: str) -> str:
        """Give the place where ``job`` saves."""
        return f"{self.base}/{job}"

    def checkpoint(self, job: str, step: int) -> str:
        """Give the id of a checkpoint."""
        return f"{self.root(job)}/{checkpoint_name(step)}"

    def shown(self, job: str, step: int | None = None) -> str:
        """Give one of these as a user would type it."""
        return self.root(job) if step is None else self.checkpoint(job, step)

    def leftovers(self, job: str, step: int) -> dict[str, int]:
        """Give bytes by name of what a killed save left of its data files."""
        return self.data_files(job, step)

    def store(self, job: str, step: int) -> Store:
        """Open a checkpoint's store."""
        return OpenWith(self.storage_options)(self.checkpoint(job, step))

    def is_committed(self, job: str, step: int) -> bool:
        """Test whether there is a checkpoint."""
        return has_checkpoint(self.store(job, step))

    def index(self, job: str, step: int) -> CheckpointIndex:
        """Read the index of a checkpoint."""
        return open_index(self.store(job, step))

    def newest(self, job: str) -> str | None:
        """See `newest_checkpoint`."""
        return newest_checkpoint(self.root(job), self.storage_options)

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
        store, index = self.store(job, step), self.index(job, step)
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

    def shown(self, job: str, step: int | None = None) -> str:
        """Give a path relative to where the demo types its commands."""
        return super().shown(job, step).removeprefix(f"{self.base}/")


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
        client = self._server.client()
        try:
            prefix = f"{job}/{checkpoint_name(step)}/"
            bucket, found = self._server.bucket, {}
            begun = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", [])
            for upload in begun:
                where = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                parts = client.list_parts(**where).get("Parts", [])
                found[upload["Key"].removeprefix(prefix)] = sum(part["Size"] for part in parts)
            return found
        finally:
            client.close()
