"""Helpers of the tests of faults: a failing store, the command line, and findings of ``dcp verify``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, NOTES_NAME
from dcp.storage.stores import Store, open_store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, StoreCall
from tests.support.command import Outcome, run

__all__ = [
    "HARMLESS",
    "MANIFEST_NAME",
    "METADATA_NAME",
    "NOTES_NAME",
    "Fault",
    "FaultInjectingStore",
    "OpenWithFaults",
    "Outcome",
    "StoreCall",
    "findings",
    "given",
    "run",
    "verified",
]

HARMLESS: Final = {"stray-file", "metadata"}
"""Findings of an intact checkpoint with leftover files of a killed save or drop."""


def given(storage_options: Mapping[str, Any], **changes: Any) -> tuple[str, ...]:
    """Return the command line's option for these storage options, without those that are None."""
    options = {key: value for key, value in {**storage_options, **changes}.items() if value is not None}
    return ("--storage-options", json.dumps(options)) if options else ()


def verified(place: object, **storage_options: Any) -> dict[str, Any]:
    """Return the report of ``dcp verify``; without a checkpoint, a report without findings."""
    reports = run("verify", place, "--json", *given(storage_options)).json
    report: dict[str, Any] = reports[0] if reports else {"ok": False, "findings": []}
    return report


def findings(place: object, **storage_options: Any) -> set[str]:
    """Return the kinds of findings of ``dcp verify``; empty without a checkpoint."""
    return {finding["kind"] for finding in verified(place, **storage_options)["findings"]}


class OpenWithFaults:
    """An ``open_store`` whose stores have faults; ``log`` is the log of the last store."""

    def __init__(self, *faults: Fault, storage_options: Mapping[str, Any] | None = None) -> None:
        self._faults = faults
        self._storage_options = storage_options
        self.store: FaultInjectingStore | None = None

    def __call__(self, path: str | os.PathLike[str]) -> Store:
        """Open the store of a path or URL."""
        self.store = FaultInjectingStore(open_store(path, self._storage_options), *self._faults)
        return self.store

    @property
    def log(self) -> list[StoreCall]:
        """The requests to the store."""
        return [] if self.store is None else self.store.log
