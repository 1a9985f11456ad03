"""Versions of `tests.support.versions` on an S3 server: save, load, list; also in forked processes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from dcp.storage.stores import Store, open_store
from tests.support.fault_doors import MANIFEST_NAME, METADATA_NAME, Fault, FaultInjectingStore, verified
from tests.support.s3 import RawS3, raw_s3
from tests.support.versions import ABSENT, seen_by_dcp, version_of, version_state

__all__ = ["CLEAN", "Place"]

CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
"""The listing of a checkpoint with one data file."""


@dataclass(frozen=True)
class Place:
    """A checkpoint id on an S3 server, with its storage options. ``large`` as in `version_state`."""

    url: str
    storage_options: dict[str, Any] = field(repr=False)
    large: int = 0

    def at(self, name: str) -> Place:
        """Return a place below this one."""
        return Place(f"{self.url}/{name}", self.storage_options, self.large)

    def store(self) -> Store:
        """Open the folder as a store."""
        return open_store(self.url, self.storage_options)

    def save(self, version: int, *faults: Fault, **options: Any) -> FaultInjectingStore:
        """Save a version by `dcp.save` in this process alone; return the store, with its log."""
        store = FaultInjectingStore(self.store(), *faults)
        writer = dcp.FileSystemWriter(self.url, open_store=lambda path: store, **options)
        dcp.save(version_state(version, large=self.large), storage_writer=writer, no_dist=True)
        return store

    def stock_save(self, version: int) -> None:
        """Save a version with stock torch, by its own writer and s3fs."""
        writer = FsspecWriter(self.url, **self._uncached)
        stock_save(version_state(version, large=self.large), storage_writer=writer, no_dist=True)

    def seen(self, **options: Any) -> int | str:
        """Return the version loaded by `dcp.load`, ABSENT, or the name of the error's class."""
        url: Any = self.url
        return seen_by_dcp(url, large=self.large, storage_options=self.storage_options, **options)

    def seen_by_stock(self) -> int | str:
        """Return the version loaded by stock torch, ABSENT without `.metadata`, or the error's class."""
        if METADATA_NAME not in self.raw.list(f"{self.url}/"):
            return ABSENT
        state = version_state(0, large=self.large)
        try:
            stock_load(state, storage_reader=FsspecReader(self.url, **self._uncached), no_dist=True)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - part of the result
            return type(error).__name__
        return version_of(state, large=self.large)

    def findings(self) -> set[str]:
        """Return the kinds of findings of `dcp verify`; empty without a commit."""
        return {finding["kind"] for finding in self.report()["findings"]}

    def report(self) -> dict[str, Any]:
        """Return the JSON of `dcp verify`."""
        return verified(self.url, **self.storage_options)

    def listing(self) -> dict[str, int]:
        """Count objects by kind: manifest, metadata, data; list all others by name."""
        kinds: dict[str, int] = {}
        for name in self.raw.list(f"{self.url}/"):
            kind = {MANIFEST_NAME: "manifest", METADATA_NAME: "metadata"}.get(name, name)
            kind = "data" if name.endswith(".distcp") else kind
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds

    def uploads(self) -> int:
        """Count unfinished multipart uploads."""
        return len(self.raw.uploads(f"{self.url}/"))

    def copy_to(self, target: Place) -> None:
        """Copy all objects to another place."""
        names = self.raw.list(f"{self.url}/")
        self.raw.write_many([(f"{target.url}/{name}", self.raw.read(f"{self.url}/{name}")) for name in names])

    @property
    def raw(self) -> RawS3:
        """A client for plain requests, one for each process."""
        key = os.getpid(), str(self.storage_options["endpoint_url"])
        if key not in _clients:
            _clients[key] = _stack.enter_context(raw_s3(self))
        return _clients[key]

    @property
    def _uncached(self) -> dict[str, Any]:
        options = {key: value for key, value in self.storage_options.items() if key not in _DCP_OPTIONS}
        return {**options, "use_listings_cache": False}


_DCP_OPTIONS = {"part_bytes", "concurrency", "retry_seconds", "request_timeout_seconds", "conditional_writes"}
"""Options unknown to torch's file system."""

_clients: dict[tuple[int, str], RawS3] = {}
_stack = ExitStack()
