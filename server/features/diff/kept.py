"""Differences that requests share: made of two indexes, or as the last job has found them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from dcp.server.core.data.access import Readable
from dcp.server.core.data.sharing import SharedValues
from dcp.server.core.http.context import Service
from dcp.server.core.jobs.ledger.reading import get_job, last_job
from dcp.server.core.jobs.ledger.states import JobRow
from dcp.server.core.jobs.subjects import find_subject
from dcp.server.core.security.principal import Principal
from dcp.server.features.diff.job import DiffKind, DiffParams
from dcp.server.records.contents import Basis

if TYPE_CHECKING:
    from dcp.server.features.diff.differences import ContentDifference

__all__ = ["Differences"]

_DIFFERENCES: Final = 8
_DIFFERENCES_BYTES: Final = 96 << 20


class Differences:
    """The last differences that were asked for, of one process: ``service.own(Differences)``."""

    def __init__(self, service: Service) -> None:
        self._database = service.database
        self._differences: SharedValues[str, ContentDifference]
        self._differences = SharedValues(count=_DIFFERENCES, kept_bytes=_DIFFERENCES_BYTES)

    def of_indexes(self, before: Readable, after: Readable, basis: Basis | None) -> ContentDifference:
        """What differs as far as the indexes tell. Raises problems of the storage."""
        from dcp.server.features.diff.differences import compare  # only here, as all that reads checkpoints

        key = after.opened.etag(before.opened.etag("diff"), basis)
        with after.problems(), before.problems():
            return self._differences.get(key, lambda: compare(before.opened, after.opened, basis))

    def kept(self, a: int, b: int, caller: Principal) -> tuple[JobRow, ContentDifference] | None:
        """What the last job has found that compared all values; None before there was one, and where a
        checkpoint was replaced since. Raises MissingError and StateError."""
        from dcp.server.features.diff.differences import of_document

        with self._database.read() as connection:
            contents = {
                name: find_subject(connection, number, caller.roots).content
                for name, number in (("a", a), ("b", b))
            }
            key = DiffKind.result_key(DiffParams(a=a, b=b))
            job = last_job(connection, key, caller.roots, succeeded=True)
        if job is None or job.result is None or job.result.get("contents") != contents:
            return None
        return job, self._differences.get(f"job {job.id}", lambda: of_document(self._result_of(job)))

    def _result_of(self, job: JobRow) -> Mapping[str, Any]:
        with self._database.read() as connection:
            return get_job(connection, job.id).result or {}
