"""From a checkpoint of the catalog to its bytes, for those who may see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from fastapi import Depends, Request

from dcp.server.catalog.contents.verifications import get_statistics, statistics_of_tensor
from dcp.server.catalog.details import CheckpointDetail, get_checkpoint
from dcp.server.data.downloads import Plans
from dcp.server.data.opening import OpenCheckpoint, OpenCheckpoints, OpenChunks
from dcp.server.data.sending.responses import Streams
from dcp.server.data.sharing import SharedValues
from dcp.server.http.context import Service
from dcp.server.http.dependencies import ServiceDep
from dcp.server.jobs.kinds.diff import DiffParams
from dcp.server.jobs.ledger import find_job, get_job, jobs_of_key
from dcp.server.jobs.ledger.states import JobRow
from dcp.server.problems import ConflictError, GoneError
from dcp.server.records.contents import Basis
from dcp.server.records.declaring import moment
from dcp.server.records.drawings import TensorStatistics
from dcp.server.roots import StorageRoot
from dcp.server.security.keys import valid_keys
from dcp.server.security.principal import Principal
from dcp.storage.errors import CheckpointError

if TYPE_CHECKING:
    from dcp.server.data.differences import ContentDifference

__all__ = ["DataAccess", "DataDep", "Readable"]

_GONE: Final = {
    "deleted": "it was deleted; restore it first",
    "purged": "it was deleted, and its files are gone",
}
_DIFFERENCES: Final = 8
_DIFFERENCES_BYTES: Final = 96 << 20
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
        self._service = service
        self.checkpoints = OpenCheckpoints()
        settings = service.settings
        self.streams = Streams(settings.max_downloads, settings.min_download_bytes_per_second)
        self.plans = Plans()
        self._differences: SharedValues[str, ContentDifference]
        self._differences = SharedValues(count=_DIFFERENCES, kept_bytes=_DIFFERENCES_BYTES)

    def row(self, checkpoint_id: int, caller: Principal) -> CheckpointDetail:
        """The checkpoint as the catalog has it. Raises MissingError."""
        with self._service.database.read() as connection:
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
        if row.root not in self._service.roots:
            raise GoneError(f"the root {row.root} is not configured any more")
        return row, self._service.roots.get(row.root)

    def kept_statistics(self, checkpoint_id: int, fqn: str, caller: Principal) -> TensorStatistics | None:
        """What a job has computed of one tensor; None if nothing, or if the checkpoint was replaced since.
        Raises MissingError."""
        with self._service.database.read() as connection:
            row = get_statistics(connection, checkpoint_id, caller.roots)
            if row is None or row.is_stale:
                return None
            found = statistics_of_tensor(connection, checkpoint_id, fqn)
        if found is None:
            return None
        return TensorStatistics(
            found["fqn"],
            found["dtype"],
            tuple(found["shape"]),
            found["statistics"],
            is_kept=True,
            computed_at=moment(row.created_seconds),
        )

    def difference(self, before: Readable, after: Readable, basis: Basis | None) -> ContentDifference:
        """What differs as far as the indexes tell. Raises problems of the storage."""
        from dcp.server.data.differences import compare  # only here, as all that reads checkpoints

        key = after.opened.etag(before.opened.etag("diff"), basis)
        with after.problems(), before.problems():
            return self._differences.get(key, lambda: compare(before.opened, after.opened, basis))

    def kept_difference(self, a: int, b: int, caller: Principal) -> tuple[JobRow, ContentDifference] | None:
        """What the last job has found that compared all values; None before there was one, and where a
        checkpoint was replaced since. Raises MissingError and StateError."""
        from dcp.server.data.differences import of_document
        from dcp.server.jobs.kinds.shared.subjects import find_subject

        with self._service.database.read() as connection:
            contents = {
                name: find_subject(connection, number, caller.roots).content
                for name, number in (("a", a), ("b", b))
            }
            _, found = jobs_of_key(connection, "diff", DiffParams(a=a, b=b).dedup_key, caller.roots)
            job = None if found is None else find_job(connection, found, whole=False)
        if job is None or job.result is None or job.result.get("contents") != contents:
            return None
        return job, self._differences.get(f"job {job.id}", lambda: of_document(self._result_of(job)))

    def _result_of(self, job: JobRow) -> Mapping[str, Any]:
        with self._service.database.read() as connection:
            return get_job(connection, job.id).result or {}

    def _is_allowed(self, key_id: int | None) -> bool:
        if key_id is None:
            return True
        with self._service.database.read() as connection:
            return bool(valid_keys(connection, [key_id], time.time()))


async def _data(request: Request, service: ServiceDep) -> DataAccess:
    found = getattr(request.app.state, "data", None)
    if found is None:
        found = request.app.state.data = DataAccess(service)
    return cast(DataAccess, found)


DataDep = Annotated[DataAccess, Depends(_data)]
