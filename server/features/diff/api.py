"""Differences in the API: of two indexes at once, or of values as the last job has found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import Query

from dcp.server.catalog.cursors import encode_cursor, offset_of, query_mark
from dcp.server.catalog.name_patterns import check_pattern
from dcp.server.catalog.values import clean_text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.sharing import SharedValues
from dcp.server.core.http.dependencies import Page, PageParams
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.jobs.ledger import find_job, get_job, jobs_of_key
from dcp.server.core.jobs.ledger.states import JobRow
from dcp.server.core.jobs.subjects import find_subject
from dcp.server.core.problems import NotFoundError
from dcp.server.features.diff import feature
from dcp.server.features.diff.job import DiffKind, DiffParams
from dcp.server.records.contents import Basis, Diff, DifferenceKind, DifferenceOrder
from dcp.server.records.declaring import moment

if TYPE_CHECKING:
    from dcp.server.features.diff.differences import ContentDifference

__all__ = ["DiffPage", "Differences", "page_of"]

_MAX_OBJECTS: Final = 500
_BASIS: Final = (
    "values: as the job diff has found last, not found before that; else checksums where both have them in "
    "their indexes, else structure."
)
_ORDER: Final = (
    "The largest differences first; name: as they were saved; weights: by relative_l2, those of optimizers "
    "last."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPage(Diff):
    """What differs. `counts` are of all tensors, `tensors` are a page of those that were asked for; `objects`
    are the first 500."""

    next_cursor: str | None


class Differences:
    """The last differences that requests of one process needed: ``service.own(Differences)``."""

    def __init__(self, _service: object) -> None:
        self._values = SharedValues[str, "ContentDifference"](count=8, kept_bytes=96 << 20)

    def of_indexes(self, ask: Ask, a: int, b: int, basis: Basis | None) -> tuple[object, ContentDifference]:
        """The difference as far as the indexes tell, and a mark of both contents. Raises as `Data.open`."""
        from dcp.server.features.diff.differences import compare  # only here, as all that reads checkpoints

        after, before = ask.data.open(b), ask.data.open(a)
        key = after.opened.etag(before.opened.etag("diff"), basis)
        with after.problems(), before.problems():
            found = self._values.get(key, lambda: compare(before.opened, after.opened, basis))
        return (before.opened.stamp, after.opened.stamp), found

    def kept(self, ask: Ask, a: int, b: int) -> tuple[JobRow, ContentDifference] | None:
        """The last job that compared all values, and its result; None without one, and where a checkpoint was
        replaced since. Raises MissingError and StateError."""
        from dcp.server.features.diff.differences import of_document

        with ask.reading() as connection:
            contents = {
                name: find_subject(connection, number, ask.visible).content
                for name, number in (("a", a), ("b", b))
            }
            _, found = jobs_of_key(connection, DiffKind.dedup_key(DiffParams(a=a, b=b)), ask.visible)
            job = None if found is None else find_job(connection, found, whole=False)
        if job is None or job.result is None or job.result.get("contents") != contents:
            return None
        return job, self._values.get(f"job {job.id}", lambda: of_document(_result_of(job, ask)))


def _result_of(job: JobRow, ask: Ask) -> Mapping[str, Any]:
    return ask.find(get_job, job.id).result or {}


@feature.get(
    "/checkpoints/{checkpoint_id}/diff",
    tag="data",
    errors=(400, 401, 403, 404, 409, 410, 421, 422, 429, 503),
)
def diff_checkpoints(
    checkpoint_id: IdPath,
    before: Annotated[int, Query(ge=1, le=MAX_ID, description="The checkpoint to compare with.")],
    ask: Ask,
    page: Page,
    basis: Annotated[Basis | None, Query(description=_BASIS)] = None,
    kind: Annotated[
        list[DifferenceKind] | None, Query(max_length=6, description="All, if not given.")
    ] = None,
    glob: Annotated[str | None, Query(min_length=1, max_length=256, examples=["layers.*.weight"])] = None,
    order: Annotated[DifferenceOrder, Query(description=_ORDER)] = "name",
) -> DiffPage:
    """What differs from the checkpoint `before`. No tensor is read; for values there is the job `diff`."""
    return page_of(ask, before, checkpoint_id, page, basis, kind or (), glob, order)


def page_of(
    ask: Ask,
    a: int,
    b: int,
    page: PageParams,
    basis: Basis | None,
    kinds: Sequence[DifferenceKind] = (),
    glob: str | None = None,
    order: DifferenceOrder = "name",
) -> DiffPage:
    """A page of the tensors of these kinds that differ between ``a``, the one before, and ``b``. Raises
    NotFoundError where the values are to be compared and no job has done that."""
    from dcp.server.features.diff.differences import chosen

    if glob is not None:
        check_pattern("glob", glob)
    content, found, job = _found(ask, a, b, basis)
    mark = query_mark("diff", a, b, content, basis, kinds, glob, order)
    begin = offset_of(page.cursor, mark)
    tensors = chosen(found, kinds, glob, order)
    end = begin + page.limit
    return DiffPage(
        a=a,
        b=b,
        basis=found.basis,
        counts=found.counts,
        equal_tensors=found.equal,
        equal_objects=found.equal_objects,
        object_count=found.object_count,
        tensors=_cleaned(tensors[begin:end]),
        objects=_cleaned(found.objects[:_MAX_OBJECTS]),
        matching=len(tensors),
        job_id=None if job is None else job.id,
        created_at=None if job is None else moment(job.created_seconds),
        next_cursor=encode_cursor(mark, end) if end < len(tensors) else None,
    )


def _cleaned(found: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(replace(one, fqn=clean_text(one.fqn)) for one in found)


def _found(ask: Ask, a: int, b: int, basis: Basis | None) -> tuple[object, ContentDifference, JobRow | None]:
    """A mark of the content, the difference, and the job that has found it."""
    differences = ask.service.own(Differences)
    if basis != "values":
        return *differences.of_indexes(ask, a, b, basis), None
    kept = differences.kept(ask, a, b)
    if kept is None:
        raise NotFoundError(
            f"the values of {a} and {b} have not been compared, or one was replaced since; "
            "the job diff does it"
        )
    job, found = kept
    return job.id, found, job
