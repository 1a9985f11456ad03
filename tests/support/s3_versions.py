"""Versions of `tests.support.versions` on an S3 server: saved, seen, counted; also in forked processes."""

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
"""The listing of a checkpoint of one file."""


@dataclass(frozen=True)
class Place:
    """A checkpoint id on an S3 server, and how to get there. ``large`` as in `version_state`."""

    url: str
    storage_options: dict[str, Any] = field(repr=False)
    large: int = 0

    def at(self, name: str) -> Place:
        """A place below this one."""
        return Place(f"{self.url}/{name}", self.storage_options, self.large)

    def store(self) -> Store:
        """The folder as a store."""
        return open_store(self.url, self.storage_options)

    def save(self, version: int, *faults: Fault, **options: Any) -> FaultInjectingStore:
        """`dcp.save` of a version by this process alone; returns the store, with its log."""
        store = FaultInjectingStore(self.store(), *faults)
        writer = dcp.FileSystemWriter(self.url, open_store=lambda path: store, **options)
        dcp.save(version_state(version, large=self.large), storage_writer=writer, no_dist=True)
        return store

    def stock_save(self, version: int) -> None:
        """Stock torch's save, by its own writer and s3fs."""
        writer = FsspecWriter(self.url, **self._uncached)
        stock_save(version_state(version, large=self.large), storage_writer=writer, no_dist=True)

    def seen(self, **options: Any) -> int | str:
        """The version that `dcp.load` gives, ABSENT, or the name of the error's class."""
        url: Any = self.url
        return seen_by_dcp(url, large=self.large, storage_options=self.storage_options, **options)

    def seen_by_stock(self) -> int | str:
        """The version that stock's own reader gives, ABSENT without `.metadata`, or the error's class."""
        if METADATA_NAME not in self.raw.list(f"{self.url}/"):
            return ABSENT
        state = version_state(0, large=self.large)
        try:
            stock_load(state, storage_reader=FsspecReader(self.url, **self._uncached), no_dist=True)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - what stock says is asked for
            return type(error).__name__
        return version_of(state, large=self.large)

    def findings(self) -> set[str]:
        """Kinds of what `dcp verify` finds; nothing where nothing is committed."""
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
        """Unfinished uploads in parts."""
        return len(self.raw.uploads(f"{self.url}/"))

    def copy_to(self, target: Place) -> None:
        """All objects once more, elsewhere."""
        names = self.raw.list(f"{self.url}/")
        self.raw.write_many([(f"{target.url}/{name}", self.raw.read(f"{self.url}/{name}")) for name in names])

    @property
    def raw(self) -> RawS3:
        """Plain requests, by one client a process."""
        key = os.getpid(), str(self.storage_options["endpoint_url"])
        if key not in _clients:
            _clients[key] = _stack.enter_context(raw_s3(self))
        return _clients[key]

    @property
    def _uncached(self) -> dict[str, Any]:
        options = {key: value for key, value in self.storage_options.items() if key not in _OURS}
        return {**options, "use_listings_cache": False}


_OURS = {"part_bytes", "concurrency", "retry_seconds", "request_timeout_seconds", "conditional_writes"}
"""Options that stock's file system does not know."""

_clients: dict[tuple[int, str], RawS3] = {}
_stack = ExitStack()
