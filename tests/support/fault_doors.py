"""Doors that tests of faults go through: a store that fails, the command line in this process, and what
``dcp verify`` finds."""

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
"""What `findings` has of a checkpoint beside which a killed save or drop left something."""


def given(storage_options: Mapping[str, Any], **changes: Any) -> tuple[str, ...]:
    """The command line's option with these; those that are None are left out."""
    options = {key: value for key, value in {**storage_options, **changes}.items() if value is not None}
    return ("--storage-options", json.dumps(options)) if options else ()


def verified(place: object, **storage_options: Any) -> dict[str, Any]:
    """The report of ``dcp verify``; where there is nothing, one without findings."""
    reports = run("verify", place, "--json", *given(storage_options)).json
    report: dict[str, Any] = reports[0] if reports else {"ok": False, "findings": []}
    return report


def findings(place: object, **storage_options: Any) -> set[str]:
    """Kinds of what ``dcp verify`` finds; nothing where there is nothing."""
    return {finding["kind"] for finding in verified(place, **storage_options)["findings"]}


class OpenWithFaults:
    """An ``open_store`` whose stores have faults; ``log`` is that of the last one."""

    def __init__(self, *faults: Fault, storage_options: Mapping[str, Any] | None = None) -> None:
        self._faults = faults
        self._storage_options = storage_options
        self.store: FaultInjectingStore | None = None

    def __call__(self, path: str | os.PathLike[str]) -> Store:
        """The store of a path or URL."""
        self.store = FaultInjectingStore(open_store(path, self._storage_options), *self._faults)
        return self.store

    @property
    def log(self) -> list[StoreCall]:
        """The requests to the store."""
        return [] if self.store is None else self.store.log
