"""Checkpoints of the catalog, opened in their storage for those who may see them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fastapi import Request

from dcp.server.catalog.details import CheckpointDetail, get_checkpoint
from dcp.server.core.data.bodies import Body
from dcp.server.core.data.opening import FoundCheckpoint, OpenCheckpoint, OpenCheckpoints, find_checkpoint
from dcp.server.core.data.responses import BodyResponse, Streams, choose_range, disposition
from dcp.server.core.http.context import Service
from dcp.server.core.problems import ConflictError, GoneError
from dcp.server.core.roots import StorageRoot
from dcp.server.core.security.keys import valid_keys
from dcp.server.core.security.principal import Principal
from dcp.storage.errors import CheckpointError

__all__ = ["Data", "Readable"]

_GONE: Final = {
    "deleted": "it was deleted; restore it first",
    "purged": "it was deleted, and its files are gone",
}
_NOT_YET: Final = {
    "incomplete": "its save has not been committed",
    "unreadable": "it cannot be read",
}


@dataclass(frozen=True, slots=True)
class Readable:
    """A checkpoint as the catalog has it, its root, and its index as the storage has it now."""

    row: CheckpointDetail
    root: StorageRoot
    opened: OpenCheckpoint

    @contextmanager
    def problems(self) -> Iterator[None]:
        """Turn errors of reading it into problems."""
        with _problems(self.root):
            yield


class _Shared:
    """State that requests for bytes share in one process."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self.checkpoints = OpenCheckpoints()
        self.streams = Streams(settings.max_downloads, settings.min_download_bytes_per_second)


class Data:
    """The bytes of checkpoints, for one caller."""

    def __init__(self, service: Service, caller: Principal) -> None:
        self._service = service
        self._caller = caller
        self._shared = service.own(_Shared)

    @property
    def streams(self) -> Streams:
        """The downloads of this process."""
        return self._shared.streams

    def open(self, checkpoint_id: int) -> Readable:
        """The checkpoint, ready to be read. Raises MissingError, GoneError and ConflictError (by its state),
        and problems of the storage."""
        row, root = self._place(checkpoint_id)
        with _problems(root):
            return Readable(row, root, self._shared.checkpoints.open(find_checkpoint(root, row.key)))

    def find(self, checkpoint_id: int) -> FoundCheckpoint:
        """The checkpoint, whose index is not read. Raises as `open` does."""
        row, root = self._place(checkpoint_id)
        with _problems(root):
            return find_checkpoint(root, row.key)

    def answer(
        self,
        request: Request,
        found: Readable,
        body: Body,
        name: str,
        etag: str,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> BodyResponse:
        """The answer with the range of ``body`` that the request wants, as a file called ``name``."""
        return BodyResponse(
            body,
            choose_range(request.headers, body.size_bytes, etag),
            self.streams,
            headers={"ETag": etag, "Content-Disposition": disposition(name), **headers},
            problem=found.root.problem,
            is_allowed=self._is_allowed,
        )

    def _is_allowed(self) -> bool:
        """Whether the caller's key is still valid."""
        if self._caller.key_id is None:
            return True
        with self._service.database.read() as connection:
            return bool(valid_keys(connection, [self._caller.key_id], time.time()))

    def _place(self, checkpoint_id: int) -> tuple[CheckpointDetail, StorageRoot]:
        with self._service.database.read() as connection:
            row = get_checkpoint(connection, checkpoint_id, self._caller.roots)
        if row.state in _GONE:
            raise GoneError(f"checkpoint {checkpoint_id}: {_GONE[row.state]}", state=row.state)
        if row.state in _NOT_YET:
            raise ConflictError(f"checkpoint {checkpoint_id}: {_NOT_YET[row.state]}", state=row.state)
        if row.root not in self._service.roots:
            raise GoneError(f"the root {row.root} is not configured any more")
        return row, self._service.roots.get(row.root)


@contextmanager
def _problems(root: StorageRoot) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise root.problem(error, is_known=True) from error
