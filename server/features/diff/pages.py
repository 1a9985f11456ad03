"""The page that compares two checkpoints: their indexes, and their values once a job has compared them."""

from __future__ import annotations

from glob import escape
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.contents.tensors import parts_of
from dcp.server.catalog.details import CheckpointDetail, get_checkpoint
from dcp.server.catalog.queries.listing import neighbour
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageParams
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.pages.problems import MovedError
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import FormDep
from dcp.server.core.problems import NotFoundError, ProblemError, UnprocessableError
from dcp.server.features.diff import feature
from dcp.server.features.diff.api import DiffPage, page_of
from dcp.server.features.diff.job import DiffKind, DiffParams
from dcp.server.features.tensors.api import get_tensor_statistics
from dcp.server.features.tensors.histograms import histogram_picture
from dcp.server.records.contents import DifferenceKind, DifferenceOrder, TensorDifference

_LONG_NAME: Final = 40
_ROWS: Final = 100
_OBJECTS: Final = 50
_OFFERED: Final = 50
"""Of more than two checkpoints that were ticked in a list."""

_Id = Annotated[int, Field(ge=1, le=MAX_ID)]


class DiffView(BaseModel):
    """``b`` is compared with ``a``, the one before; ``of``: the checkpoints that were ticked in a list. Which
    tensors are shown, below which name at the top, in which order, and the histograms of which one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    a: _Id | None = None
    b: _Id | None = None
    of: Annotated[list[_Id], Field(max_length=500)] = []
    kind: DifferenceKind | None = None
    glob: Annotated[str, Field(max_length=150)] | None = None
    top: Annotated[str, Field(max_length=_LONG_NAME)] | None = None
    order: DifferenceOrder | None = None
    tensor: Annotated[str, Field(max_length=4096)] | None = None
    cursor: Annotated[str, Field(max_length=2048)] | None = None
    done: Annotated[str, Field(max_length=32)] | None = None

    @property
    def pattern(self) -> str | None:
        """The pattern of names: the text is a part of a name, below ``top``."""
        if self.top is None:
            return None if self.glob is None else f"*{self.glob}*"
        return f"{escape(self.top)}.*" + ("" if self.glob is None else f"{self.glob}*")


@feature.page("/diff", "diff.html")
def diff_page(view: Annotated[DiffView, Query()], ask: Ask) -> dict[str, Any] | Response:
    """The differences; without two checkpoints in the address a form that chooses them."""
    ticked = [ask.find(get_checkpoint, one, ask.visible) for one in view.of[:_OFFERED]]
    ticked.sort(key=_age)
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
        return page(ask.request, "diff/diff.html", 409, found=None, **values)
    return _differences(before, after, view, ask)


def _differences(
    before: CheckpointDetail, after: CheckpointDetail, view: DiffView, ask: Ask
) -> dict[str, Any]:
    found, twin = _found(before.id, after.id, view, ask)
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
    """The histograms of one tensor before and after, on common edges; or why there are none."""
    try:
        of_each = {
            name: (get_tensor_statistics(number, fqn, ask).statistics or {}).get("histogram")
            for name, number in (("before", a), ("after", b))
        }
    except ProblemError as problem:
        return {"picture": None, "problem": problem.detail}
    return {"picture": histogram_picture(of_each), "problem": None}


def _found(a: int, b: int, view: DiffView, ask: Ask) -> tuple[DiffPage, str]:
    """The differences of values where a job has found them, else of the indexes; and the path of the JSON."""
    kinds = [view.kind] if view.kind else []
    rows = PageParams(_ROWS, view.cursor)
    given: dict[str, Any] = {"before": a, "kind": view.kind, "glob": view.pattern}
    order = view.order or "weights"
    try:
        found = page_of(ask, a, b, rows, "values", kinds, view.pattern, order)
        given |= {"basis": "values", "order": order}
    except NotFoundError:
        found = page_of(ask, a, b, rows, None, kinds, view.pattern, "weights")
    query = urlencode({name: value for name, value in given.items() if value is not None})
    return found, f"/api/v1/checkpoints/{b}/diff?{query}"


def _nonfinite(a: int, b: int, found: DiffPage, ask: Ask) -> TensorDifference | None:
    """The tensor with the most values that are not finite among those that changed; None without any."""
    if found.basis != "values":
        return None
    worst = page_of(ask, a, b, PageParams(1, None), "values", order="nonfinite").tensors
    values = worst[0].values if worst else None
    return worst[0] if values is not None and values.nonfinite else None


def _age(one: CheckpointDetail) -> tuple[Any, ...]:
    return -1 if one.step is None else one.step, one.committed_at, one.id


def _with_step_before(after: CheckpointDetail, ask: Ask) -> str:
    before = ask.find(neighbour, after, ask.visible, is_next=False)
    if before is None:
        raise UnprocessableError(
            f"checkpoint {after.id} has no committed step before it: choose one to compare it with"
        )
    return f"/diff?a={before.id}&b={after.id}"


@feature.form("/diff/values", scope="read")
def compare_values_form(form: FormDep, ask: Ask) -> str:
    """Compare the values, as a job."""
    try:
        params = DiffParams(a=int(form.text("a")), b=int(form.text("b")))
    except ValueError:
        raise UnprocessableError("a and b are the numbers of two checkpoints") from None
    ask.submit(DiffKind, params)
    return f"/diff?a={params.a}&b={params.b}"
