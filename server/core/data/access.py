"""From a checkpoint of the catalog to its bytes, for those who may see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import Depends

from dcp.server.catalog.details import get_checkpoint
from dcp.server.core.data.opening import OpenCheckpoint, OpenCheckpoints, OpenChunks
from dcp.server.core.data.sending.responses import Streams
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import ServiceDep
from dcp.server.core.problems import ConflictError, GoneError
from dcp.server.core.roots import StorageRoot
from dcp.server.core.security.keys import valid_keys
from dcp.server.core.security.principal import Principal
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.storage.errors import CheckpointError

if TYPE_CHECKING:
    pass

__all__ = ["DataAccess", "DataDep", "Readable"]

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
    """A checkpoint as the catalog has it, its root, and its index as the storage has it now.

    ``is_allowed``: whether the key that it was opened with still is one.
    """

    row: CheckpointDetail
    root: StorageRoot
    opened: OpenCheckpoint
    is_allowed: Callable[[], bool]

    @contextmanager
    def problems(self) -> Iterator[None]:
        """Errors of reading it become problems."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            raise self.root.problem(error, is_known=True) from error


class DataAccess:
    """What requests for bytes share in one process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.checkpoints = OpenCheckpoints()
        settings = service.settings
        self.streams = Streams(settings.max_downloads, settings.min_download_bytes_per_second)

    def row(self, checkpoint_id: int, caller: Principal) -> CheckpointDetail:
        """The checkpoint as the catalog has it. Raises MissingError."""
        with self.service.database.read() as connection:
            return get_checkpoint(connection, checkpoint_id, caller.roots)

    def open(self, checkpoint_id: int, caller: Principal) -> Readable:
        """The checkpoint, ready to be read. Raises MissingError, GoneError and ConflictError (by its state),
        and problems of the storage."""
        row, root = self._found(checkpoint_id, caller)
        opened = self.checkpoints.open(root, row.key)
        return Readable(row, root, opened, partial(self._is_allowed, caller.key_id))

    def chunks(self, checkpoint_id: int, caller: Principal) -> OpenChunks:
        """Its chunks by rank. Raises as `open` does."""
        row, root = self._found(checkpoint_id, caller)
        return self.checkpoints.chunks(root, row.key)

    def has_chunks(self, checkpoint_id: int, caller: Principal) -> bool:
        """Whether they are there already. Raises as `open` does."""
        row, root = self._found(checkpoint_id, caller)
        return self.checkpoints.has_chunks(root, row.key)

    def _found(self, checkpoint_id: int, caller: Principal) -> tuple[CheckpointDetail, StorageRoot]:
        row = self.row(checkpoint_id, caller)
        if row.state in _GONE:
            raise GoneError(f"checkpoint {checkpoint_id}: {_GONE[row.state]}", state=row.state)
        if row.state in _NOT_YET:
            raise ConflictError(f"checkpoint {checkpoint_id}: {_NOT_YET[row.state]}", state=row.state)
        if row.root not in self.service.roots:
            raise GoneError(f"the root {row.root} is not configured any more")
        return row, self.service.roots.get(row.root)

    def _is_allowed(self, key_id: int | None) -> bool:
        if key_id is None:
            return True
        with self.service.database.read() as connection:
            return bool(valid_keys(connection, [key_id], time.time()))


async def _data(service: ServiceDep) -> DataAccess:
    return service.own(DataAccess)


DataDep = Annotated[DataAccess, Depends(_data)]
