"""Differences of two checkpoints by API and page: by indexes immediately, by values from a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from glob import escape
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import Field

from dcp.server.catalog.cursors import encode_cursor, offset_of, query_mark
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import MAX_ID, Id, clean_text
from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.catalog.listing import neighbour
from dcp.server.catalog.names import check_pattern
from dcp.server.catalog.structures import parts_of
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.access import SharedValues
from dcp.server.core.http.dependencies import PageParams, PageQuery
from dcp.server.core.jobs.ledger.reading import get_job, last_job
from dcp.server.core.jobs.subjects import find_subject
from dcp.server.core.pages.requests import FormDep, MovedError
from dcp.server.core.problems import NotFoundError, ProblemError, UnprocessableError
from dcp.server.features.diff import (
    Basis,
    Diff,
    DifferenceKind,
    DifferenceOrder,
    DifferingTensor,
    DiffKind,
    DiffParams,
    feature,
)
from dcp.server.features.tensors.histograms import histogram_picture
from dcp.server.features.tensors.routes import get_tensor_statistics
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job

if TYPE_CHECKING:
    from dcp.server.features.diff.differences import ContentDifference


_MAX_OBJECTS: Final = 500
_BASIS: Final = (
    "values: as the job diff has found last, not found before that; else checksums where both have them in "
    "their indexes, else structure."
)
_ORDER: Final = (
    "The largest differences first; name: as they were saved; weights: by relative_l2, those of optimizers "
    "last."
)
_LONG_NAME: Final = 40
_ROWS: Final = 100
_OBJECTS: Final = 50
_OFFERED: Final = 50
"""Maximum checkpoints offered after a selection of more than two."""


class Differences:
    """Latest differences of this process: ``service.own(Differences)``."""

    def __init__(self, _service: object) -> None:
        self._values = SharedValues[str, "ContentDifference"](count=8, kept_bytes=96 << 20)

    def of_indexes(self, ask: Ask, a: int, b: int, basis: Basis | None) -> tuple[object, ContentDifference]:
        """Return the difference by indexes, and a mark of both contents. Raises as `Data.open`."""
        from dcp.server.features.diff.differences import compare  # imports numpy

        after, before = ask.data.open(b), ask.data.open(a)
        key = after.opened.etag(before.opened.etag("diff"), basis)
        with after.problems(), before.problems():
            found = self._values.get(key, lambda: compare(before.opened, after.opened, basis))
        return (before.opened.stamp, after.opened.stamp), found

    def kept(self, ask: Ask, a: int, b: int) -> tuple[Job, ContentDifference] | None:
        """Return the last job that compared all values, and its result. None without a job, or if a
        checkpoint was replaced later. Raises MissingError and StateError."""
        from dcp.server.features.diff.differences import of_document

        with ask.reading() as connection:
            contents = {
                name: find_subject(connection, number, ask.visible).content
                for name, number in (("a", a), ("b", b))
            }
            key = DiffKind.result_key(DiffParams(a=a, b=b))
            job = last_job(connection, key, ask.visible, succeeded=True)
        if job is None or job.result is None or job.result.get("contents") != contents:
            return None

        def decode() -> ContentDifference:
            return of_document(ask.find(get_job, job.id).result or {})

        return job, self._values.get(f"job {job.id}", decode)


@feature.get(
    "/checkpoints/{checkpoint_id}/diff",
    tag="data",
    errors=(400, 401, 403, 404, 409, 410, 421, 422, 429, 503),
)
def diff_checkpoints(
    checkpoint_id: IdPath,
    before: Annotated[int, Query(ge=1, le=MAX_ID, description="The checkpoint to compare with.")],
    ask: Ask,
    page: PageQuery,
    basis: Annotated[Basis | None, Query(description=_BASIS)] = None,
    kind: Annotated[
        list[DifferenceKind] | None, Query(max_length=6, description="All, if not given.")
    ] = None,
    glob: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=256,
            description="Glob for names of tensors; * matches any characters.",
            examples=["layers.*.weight"],
        ),
    ] = None,
    order: Annotated[DifferenceOrder, Query(description=_ORDER)] = "name",
) -> Diff:
    """Compare the checkpoint with `before`. No tensor is read; the job `diff` compares values."""
    from dcp.server.features.diff.differences import chosen

    if glob is not None:
        check_pattern("glob", glob)
    content, found, job = _found(ask, before, checkpoint_id, basis)
    mark = query_mark("diff", before, checkpoint_id, content, basis, kind or (), glob, order)
    begin = offset_of(page.cursor, mark)
    tensors = chosen(found, kind or (), glob, order)
    end = begin + page.limit
    return Diff(
        a=before,
        b=checkpoint_id,
        basis=found.basis,
        counts=found.counts,
        equal_tensors=found.equal,
        equal_objects=found.equal_objects,
        object_count=found.object_count,
        tensors=_cleaned(tensors[begin:end]),
        objects=_cleaned(found.objects[:_MAX_OBJECTS]),
        matching=len(tensors),
        job_id=None if job is None else job.id,
        created_at=None if job is None else job.created_at,
        next_cursor=encode_cursor(mark, end) if end < len(tensors) else None,
    )


def _cleaned(found: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(replace(one, fqn=clean_text(one.fqn)) for one in found)


def _found(ask: Ask, a: int, b: int, basis: Basis | None) -> tuple[object, ContentDifference, Job | None]:
    """Return a mark of the content, the difference, and the job of the difference."""
    differences = ask.service.own(Differences)
    if basis != "values":
        return *differences.of_indexes(ask, a, b, basis), None
    kept = differences.kept(ask, a, b)
    if kept is None:
        raise NotFoundError(
            f"no comparison of the values of checkpoints {a} and {b}, or one was replaced since; submit a "
            "job of the kind diff"
        )
    job, found = kept
    return job.id, found, job


# -- the page ------------------------------------------------------------------------------------------------


class DiffView(QueryModel):
    """Query: ``b`` is compared with the earlier ``a``; ``of`` are checkpoints selected in a list. The other
    fields select tensors, the ``top`` of their names, the order, and a tensor for histograms."""

    a: Id | None = None
    b: Id | None = None
    of: Annotated[list[Id], Field(max_length=500)] = Field(default_factory=list)
    kind: DifferenceKind | None = None
    glob: Annotated[str, Field(max_length=150)] | None = None
    top: Annotated[str, Field(max_length=_LONG_NAME)] | None = None
    order: DifferenceOrder | None = None
    tensor: Annotated[str, Field(max_length=4096)] | None = None
    cursor: Annotated[str, Field(max_length=2048)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None

    @property
    def pattern(self) -> str | None:
        """Glob of names: the text as a part of a name below ``top``."""
        if self.top is None:
            return None if self.glob is None else f"*{self.glob}*"
        return f"{escape(self.top)}.*" + ("" if self.glob is None else f"{self.glob}*")


@feature.page("/diff", "diff.html")
def diff_page(view: Annotated[DiffView, Query()], ask: Ask) -> dict[str, Any] | Response:
    """Show the differences; without two checkpoints, a form to select them."""
    ticked = [ask.find(get_checkpoint, one, ask.visible) for one in view.of[:_OFFERED]]
    ticked.sort(key=lambda one: (-1 if one.step is None else one.step, one.committed_at, one.id))
    if len(view.of) == 2:
        raise MovedError(f"/diff?a={ticked[0].id}&b={ticked[1].id}")
    after_id = view.of[0] if len(view.of) == 1 else view.b
    if len(view.of) > 2 or after_id is None:
        twin = "/api/v1/checkpoints"
        return {"twin": twin, "found": None, "view": view, "ticked": ticked, "after": None, "gone": []}
    after = ask.find(get_checkpoint, after_id, ask.visible)
    if view.of or view.a is None:
        raise MovedError(_with_step_before(after, ask))
    before = ask.find(get_checkpoint, view.a, ask.visible)
    if gone := [one for one in (before, after) if one.state != "committed"]:
        values = {"view": view, "gone": gone, "before": before, "after": after}
        return ask.page("diff/diff.html", 409, found=None, **values)
    return _differences(before, after, view, ask)


def _differences(
    before: CheckpointDetail, after: CheckpointDetail, view: DiffView, ask: Ask
) -> dict[str, Any]:
    found, twin = _shown(before.id, after.id, view, ask)
    return {
        "twin": twin,
        "view": view,
        "before": before,
        "after": after,
        "gone": [],
        "found": found,
        "tops": [one.name for one in ask.find(parts_of, after.structure_id) if len(one.name) < _LONG_NAME],
        "nonfinite": _nonfinite(before.id, after.id, found, ask),
        "order": view.order or "weights",
        "objects": found.objects[:_OBJECTS],
        "job": ask.last_job(DiffKind, DiffParams(a=before.id, b=after.id), found.job_id or 0),
        "histograms": None if view.tensor is None else _histograms(before.id, after.id, view.tensor, ask),
    }


def _histograms(a: int, b: int, fqn: str, ask: Ask) -> dict[str, Any]:
    """Return histograms of one tensor on common edges, or the reason for their absence."""
    try:
        of_each = {
            name: (get_tensor_statistics(number, fqn, ask).statistics or {}).get("histogram")
            for name, number in (("before", a), ("after", b))
        }
    except ProblemError as problem:
        return {"picture": None, "problem": problem.detail}
    return {"picture": histogram_picture(of_each), "problem": None}


def _shown(a: int, b: int, view: DiffView, ask: Ask) -> tuple[Diff, str]:
    """Return differences of values if a job found them, or of the indexes; and the path of the JSON."""
    kinds = [view.kind] if view.kind else []
    rows = PageParams(_ROWS, view.cursor)
    given: dict[str, Any] = {"before": a, "kind": view.kind, "glob": view.pattern}
    order = view.order or "weights"
    try:
        found = diff_checkpoints(b, a, ask, rows, "values", kinds, view.pattern, order)
        given |= {"basis": "values", "order": order}
    except NotFoundError:
        found = diff_checkpoints(b, a, ask, rows, None, kinds, view.pattern, "weights")
    query = urlencode({name: value for name, value in given.items() if value is not None})
    return found, f"/api/v1/checkpoints/{b}/diff?{query}"


def _nonfinite(a: int, b: int, found: Diff, ask: Ask) -> DifferingTensor | None:
    """Return the changed tensor with the most NaN or infinite values, or None."""
    if found.basis != "values":
        return None
    worst = diff_checkpoints(b, a, ask, PageParams(1, None), "values", order="nonfinite").tensors
    values = worst[0].values if worst else None
    return worst[0] if values is not None and values.nonfinite else None


def _with_step_before(after: CheckpointDetail, ask: Ask) -> str:
    before = ask.find(neighbour, after, ask.visible, is_next=False)
    if before is None:
        raise UnprocessableError(
            f"checkpoint {after.id} has no earlier committed step: choose a checkpoint to compare with"
        )
    return f"/diff?a={before.id}&b={after.id}"


@feature.form("/diff/values", scope="read")
def compare_values_form(form: FormDep, ask: Ask) -> str:
    """Submit a job that compares values, and return to the form: the page of both, or ``on`` the page of
    ``b``."""
    try:
        params = DiffParams(a=int(form.text("a")), b=int(form.text("b")))
    except ValueError:
        raise UnprocessableError("a and b must be the ids of two checkpoints") from None
    ask.submit(DiffKind, params)
    if form.text("on") != "checkpoint":
        return f"/diff?a={params.a}&b={params.b}"
    query = {"colour": "change", **({"prefix": prefix} if (prefix := form.text("prefix")) else {})}
    return f"/checkpoints/{params.b}?{urlencode(query)}#tensors"
