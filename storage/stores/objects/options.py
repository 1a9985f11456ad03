"""Our own options of an object store, separated from those of the file system below it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dcp.storage.errors import StorageError

__all__ = ["ConditionalWrites", "ObjectOptions"]

ConditionalWrites = Literal["auto", "trust", "off"]
"""How a commit makes sure that nobody else commits at the same time. "auto": by the service's conditional
writes, tried out once unless they are known to work. "trust": as "auto", without trying. "off": look, then
write: what another writer does in between is lost. For services without conditional writes and one writer
to a place."""


def _default_concurrency() -> int:
    return max(8, min(16, 4 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True, kw_only=True)
class ObjectOptions:
    """Options that can be set in ``storage_options`` beside the file system's own options.

    - ``conditional_writes``: see `ConditionalWrites`.
    - ``retry_seconds``: for how long a request that fails in passing (throttled, timed out, reset, an error
      of the server) is repeated. 0 tries once.
    - ``request_timeout_seconds``: how long one attempt may wait for the next bytes.
    - ``concurrency``: requests that are under way at a time, for a store object: 4 a core, from 8 to 16, as
      more than the cores can serve only wait for each other.
    - ``part_bytes``: size of the parts that a file is uploaded in; larger ones are taken for files that
      would need too many. Memory for uploads is ``concurrency * part_bytes``.
    """

    conditional_writes: ConditionalWrites = "auto"
    retry_seconds: float = 120.0
    request_timeout_seconds: float = 60.0
    concurrency: int = field(default_factory=_default_concurrency)
    part_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("retry_seconds", "request_timeout_seconds", "concurrency", "part_bytes"):
            value, whole = getattr(self, name), name in ("concurrency", "part_bytes")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "a whole number" if whole else "a number of seconds"
                raise StorageError(f"storage option {name} must be {kind}, not a {type(value).__name__}")
        if self.conditional_writes not in ("auto", "trust", "off"):
            raise StorageError(f"conditional_writes must be auto, trust or off: {self.conditional_writes!r}")
        if self.concurrency < 1 or self.part_bytes < 5 << 20 or self.part_bytes % 4096:
            raise StorageError(
                "concurrency must be at least 1, part_bytes a multiple of 4096 from 5 MiB on, as S3 wants: "
                f"{self.concurrency=}, {self.part_bytes=}"
            )
        if self.retry_seconds < 0 or self.request_timeout_seconds <= 0:
            raise StorageError(f"not a time to wait: {self.retry_seconds=}, {self.request_timeout_seconds=}")

    @classmethod
    def split(cls, storage_options: Mapping[str, Any] | None) -> tuple[ObjectOptions, dict[str, Any]]:
        """Return our options, and those for the file system."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = dict(storage_options or {})
        ours = {name: given.pop(name) for name in names & given.keys()}
        return cls(**ours), given
