"""Two checkpoints: what was added, removed, changed; and by how much, once a job has compared the values."""

from __future__ import annotations

from glob import escape
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.core.data.access import DataAccess, DataDep
from dcp.server.core.http.dependencies import Author, Caller, Db, PageParams, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.inputs import MAX_ID
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.pages.problems import MovedError
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import FormDep
from dcp.server.core.problems import NotFoundError, ProblemError, UnprocessableError
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.answers import CheckpointAnswer
from dcp.server.features.checkpoints.queries import CheckpointQuery
from dcp.server.features.diff import api
from dcp.server.features.diff.job import DiffKind, DiffParams
from dcp.server.features.jobs.pages import last_job
from dcp.server.features.tensors import drawings_api
from dcp.server.features.tensors.answers import DiffAnswer, TensorDifferenceAnswer
from dcp.server.features.tensors.histograms import histogram_picture
from dcp.server.features.tensors.trees import parts_of
from dcp.server.records.contents import DifferenceKind, DifferenceOrder

__all__ = ["router"]

router = pages_router()

_LONG_NAME: Final = 40
_ROWS: Final = 100
_OBJECTS: Final = 50
_OFFERED: Final = 50
"""Of those that were ticked in a list, where these are more than two."""

_NOBODY: Final[dict[str, Any]] = {"before": None, "after": None, "gone": []}

_Id = Annotated[int, Field(ge=1, le=MAX_ID)]


class DiffView(BaseModel):
    """``b`` is compared with ``a``, the one before; ``of``: those that were ticked in a list. Which tensors,
    below which name at the top, in which order, and of which one the histograms are shown."""

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
        """What is typed is a part of a name, below ``top``."""
        if self.top is None:
            return None if self.glob is None else f"*{self.glob}*"
        return f"{escape(self.top)}.*" + ("" if self.glob is None else f"{self.glob}*")


@router.get("/diff", dependencies=READ)
def diff_page(
    view: Annotated[DiffView, Query()], request: Request, database: Db, data: DataDep, caller: Caller
) -> Response:
    """What differs; without two checkpoints in the address how they are chosen."""
    if view.of and len(view.of) <= 2:
        raise MovedError(_ticked(view.of, database, caller))
    if view.of or view.b is None:
        many = [
            checkpoints_api.get_checkpoint(one, database, caller, Response()) for one in view.of[:_OFFERED]
        ]
        many.sort(key=_age)
        twin = "/api/v1/checkpoints"
        return page(request, "diff.html", found=None, view=view, ticked=many, twin=twin, **_NOBODY)
    if view.a is None:
        raise MovedError(_with_step_before(view.b, database, caller))
    before = checkpoints_api.get_checkpoint(view.a, database, caller, Response())
    after = checkpoints_api.get_checkpoint(view.b, database, caller, Response())
    if gone := [one for one in (before, after) if one.state != "committed"]:
        return page(request, "diff.html", 409, found=None, view=view, gone=gone, before=before, after=after)
    found, twin = _found(view.a, view.b, view, data, caller)
    return page(
        request,
        "diff.html",
        twin=twin,
        view=view,
        before=before,
        after=after,
        gone=[],
        found=found,
        tops=[one.name for one in parts_of(view.b, database, data, caller) if len(one.name) < _LONG_NAME],
        nonfinite=_nonfinite(view.a, view.b, found, data, caller),
        order=_order(view, found),
        objects=found.objects[:_OBJECTS],
        job=last_job(DiffKind.result_key(DiffParams(a=view.a, b=view.b)), database, caller, found.job_id),
        histograms=None if view.tensor is None else _histograms(view.a, view.b, view.tensor, data, caller),
    )


def _histograms(a: int, b: int, fqn: str, data: DataAccess, caller: Caller) -> dict[str, Any]:
    """Of one tensor before and after, on common edges; or why there are none."""
    try:
        of_each = {
            name: (drawings_api.get_tensor_statistics(number, fqn, data, caller).statistics or {})
            for name, number in (("before", a), ("after", b))
        }
    except ProblemError as problem:
        return {"picture": None, "problem": problem.detail}
    found = {name: statistics.get("histogram") for name, statistics in of_each.items()}
    return {"picture": histogram_picture(found), "problem": None}


def _order(view: DiffView, found: DiffAnswer) -> DifferenceOrder:
    return view.order or "weights"


def _found(a: int, b: int, view: DiffView, data: DataAccess, caller: Caller) -> tuple[DiffAnswer, str]:
    """By values where a job has compared them, else by what the indexes tell; and where the JSON is."""
    kinds = [view.kind] if view.kind else None
    params = PageParams(_ROWS, view.cursor)
    given: dict[str, Any] = {"before": a, "kind": view.kind, "glob": view.pattern}
    try:
        order = view.order or "weights"
        found = api.diff_checkpoints(b, a, data, caller, params, "values", kinds, view.pattern, order)
        given |= {"basis": "values", "order": order}
    except NotFoundError:
        found = api.diff_checkpoints(b, a, data, caller, params, None, kinds, view.pattern, "weights")
    query = urlencode({name: value for name, value in given.items() if value is not None})
    return found, f"/api/v1/checkpoints/{b}/diff?{query}"


def _nonfinite(
    a: int, b: int, found: DiffAnswer, data: DataAccess, caller: Caller
) -> TensorDifferenceAnswer | None:
    """The tensor with the most values that are not finite among those that changed; None without any."""
    if found.basis != "values":
        return None
    first = PageParams(1, None)
    worst = api.diff_checkpoints(b, a, data, caller, first, "values", None, None, "nonfinite").tensors
    values = worst[0].values if worst else None
    return worst[0] if values is not None and values.nonfinite else None


def _ticked(numbers: list[int], database: Db, caller: Caller) -> str:
    if len(numbers) == 1:
        return _with_step_before(numbers[0], database, caller)
    both = [checkpoints_api.get_checkpoint(one, database, caller, Response()) for one in numbers]
    before, after = sorted(both, key=_age)
    return f"/diff?a={before.id}&b={after.id}"


def _age(one: CheckpointAnswer) -> tuple[float, Any, int]:
    return -1 if one.step is None else one.step, one.committed_at or "", one.id


def _with_step_before(b: int, database: Db, caller: Caller) -> str:
    found = checkpoints_api.get_checkpoint(b, database, caller, Response())
    if found.step:
        query = CheckpointQuery(run_id=found.run_id, sort="-step", limit=1, max_step=found.step - 1)
        for one in checkpoints_api.list_checkpoints(query, database, caller).items:
            return f"/diff?a={one.id}&b={b}"
    raise UnprocessableError(f"checkpoint {b} has no committed step before it: choose one to compare it with")


@router.post("/diff/values", dependencies=[requires("read")])
def compare_values_form(
    form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Have the values compared, as a job."""
    try:
        params = DiffParams(a=int(form.text("a")), b=int(form.text("b")))
    except ValueError:
        raise UnprocessableError("a and b are the numbers of two checkpoints") from None
    submit_kind("diff", params, service, author, transact, Response())
    return RedirectResponse(f"/diff?a={params.a}&b={params.b}", 303)
