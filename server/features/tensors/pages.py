"""A tensor: its values, where they lie, what an optimizer keeps beside it, how it went on in other steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response
from fastapi.responses import RedirectResponse

from dcp.server.catalog.values import short_name
from dcp.server.core.answers import IdPath
from dcp.server.core.data.access import DataAccess, DataDep, Readable
from dcp.server.core.http.dependencies import Author, Caller, Db, PageParams, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.pages.drawing import polyline
from dcp.server.core.pages.marks import LARGE, largest_of, mark_of, rms_of
from dcp.server.core.pages.queries import READ, pages_router, query_of
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import FormDep
from dcp.server.core.problems import ProblemError, UnprocessableError
from dcp.server.core.security.principal import Principal
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.answers import CheckpointAnswer, CheckpointDetailAnswer
from dcp.server.features.checkpoints.queries import CheckpointQuery
from dcp.server.features.checkpoints.snippets import tensor_snippets
from dcp.server.features.jobs import api as jobs_api
from dcp.server.features.roots import api as roots_api
from dcp.server.features.statistics import api as stats_api
from dcp.server.features.statistics.kept import kept_statistics
from dcp.server.features.tensors.boxes import box_picture
from dcp.server.features.tensors.drawing_answers import GridValue
from dcp.server.features.tensors.heat_maps import default_parts, heat_of, spans_of
from dcp.server.features.tensors.histograms import histogram_picture
from dcp.server.features.tensors.slices import parse_slices

if TYPE_CHECKING:
    from dcp.server.features.tensors.optimizer_states import KeptState
    from dcp.server.records.contents import ShardedTensor
    from dcp.server.records.drawings import TensorStatistics

__all__ = ["router", "statistics_jobs"]

router = pages_router()

_SMALL_BYTES: Final = 1 << 20
"""What is read while a page is made; more is read for a part of it that is asked for by itself."""
_LARGE_BYTES: Final = 64 << 20
_SMALL_COUNT: Final = 2_000
"""Tensors of checkpoints whose indexes are quick to be opened, one for each step."""
_CHUNKS: Final = 200
_CELLS: Final = 16
_STEPS: Final = 24
_PANELS: Final = 4
_PANEL_ROWS: Final = 16
_READ_ROWS: Final = 6
"""A weight and what Adam and its like keep of it; others are only looked up, so that names which fit
thousands of tensors cost no more."""
_NOT_DONE: Final[Any] = ["queued", "planning", "running", "publishing", "failed"]

_TENSOR: Final = "/checkpoints/{checkpoint_id}/tensors"


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor that is ready to be read. ``fqn`` is its name in the catalog, ``of`` has its chunks."""

    found: CheckpointDetailAnswer
    readable: Readable
    fqn: str
    row: int
    of: ShardedTensor

    @property
    def elements(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.of.shape)

    @property
    def stored_bytes(self) -> int:
        """Of all its chunks."""
        index = self.readable.opened.index
        chunks = index.chunks(self.row)
        return int(index.payload_lengths[chunks.start : chunks.stop].sum())

    def url(self, path: str = "", **query: str) -> str:
        """The page of the tensor, or one below it."""
        return f"/checkpoints/{self.found.id}/tensors{path}?{urlencode({'fqn': self.fqn, **query})}"


def _named(
    checkpoint_id: IdPath,
    fqn: Annotated[str, Query(min_length=1, max_length=4096)],
    database: Db,
    data: DataDep,
    caller: Caller,
) -> Named:
    from dcp.server.core.data.shards import sharded_tensors  # only here, as all that reads tensors

    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    readable = data.open(checkpoint_id, caller)
    row = readable.opened.row(fqn)
    _, tensor = next(sharded_tensors(readable.opened.index, after_row=row - 1))
    return Named(found, readable, short_name(tensor.fqn), row, tensor)


NamedDep = Annotated[Named, Depends(_named)]


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A weight, or what an optimizer keeps of it. ``values``: its statistics; None if they are not known."""

    state: str | None
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    values: Any
    mark: Any


@dataclass(frozen=True, slots=True)
class Panel:
    """A parameter with its states. ``gradient_rms`` is of the second moment, ``alike`` the share of the first
    one in it; None where that is not known. ``is_corrected``: without the bias that both begin with."""

    kept: KeptState
    rows: tuple[PanelRow, ...]
    gradient_rms: float | None
    weight_rms: float | None
    alike: float | None
    is_corrected: bool


@router.get(_TENSOR, dependencies=READ)
def tensor_page(
    named: NamedDep,
    request: Request,
    service: ServiceDep,
    database: Db,
    data: DataDep,
    caller: Caller,
    read: bool = False,
) -> Response:
    """All about one tensor; with ``read`` also what takes reading some of it."""
    found = named.found
    roots = {root.name: root for root in roots_api.list_all(service, caller).items}
    return page(
        request,
        "tensor.html",
        twin=_twin(named),
        named=named,
        found=found,
        tensor=named.of,
        boxes=box_picture(named.of),
        chunks=named.of.chunks[:_CHUNKS],
        before=_neighbour(named, database, caller, is_next=False),
        after=_neighbour(named, database, caller, is_next=True),
        snippets=tensor_snippets(found, roots.get(found.root), named.of.fqn, str(request.base_url)),
        is_readable=named.stored_bytes <= _LARGE_BYTES,
        jobs=statistics_jobs(found.id, database, caller),
        large=LARGE,
        read=read,
        **_values_of(named, data, caller, _LARGE_BYTES if read else _SMALL_BYTES),
    )


def _twin(named: Named) -> str:
    """Its statistics; of one that is too large to be read its chunks."""
    if named.stored_bytes <= _LARGE_BYTES or not _is_plain(named.fqn):
        path, query = "tensors/statistics", {"fqn": named.fqn}
    else:
        path, query = "shards", {"glob": named.fqn}
    return f"/api/v1/checkpoints/{named.found.id}/{path}?{urlencode(query)}"


def _is_plain(fqn: str) -> bool:
    """Whether the name is no glob that the API would take for one."""
    return len(fqn) <= 256 and not any(sign in fqn for sign in "*?[")


def _neighbour(named: Named, database: Db, caller: Caller, *, is_next: bool) -> CheckpointAnswer | None:
    """The next committed one of the run that has the tensor."""
    step = named.found.step
    if step is None or (step == 0 and not is_next) or not _is_plain(named.fqn):
        return None
    wanted: dict[str, Any] = {"min_step": step + 1} if is_next else {"max_step": step - 1}
    order = "step" if is_next else "-step"
    wanted |= {"run_id": named.found.run_id, "tensor": named.fqn}
    query = query_of(CheckpointQuery, **wanted, sort=order, limit=1)
    return next(iter(checkpoints_api.list_checkpoints(query, database, caller).items), None)


def statistics_jobs(checkpoint_id: int, database: Db, caller: Principal) -> list[JobAnswer]:
    """The newest that computes statistics of the checkpoint, or has failed to; if there is one."""
    newest = PageParams(1, None)
    return jobs_api.list_jobs(
        database, caller, newest, _NOT_DONE, ["stats"], checkpoint_id=checkpoint_id
    ).items


# -- values --------------------------------------------------------------------------------------------------


def _values_of(named: Named, data: DataAccess, caller: Principal, most_bytes: int) -> dict[str, Any]:
    """Statistics, histogram and panels, as far as they are kept or not too large to be read."""
    from dcp.server.features.tensors.optimizer_states import OptimizerStates

    statistics, fault = None, None
    try:
        statistics = _statistics(named.readable, named.of.fqn, data, caller, most_bytes, with_histogram=True)
    except ProblemError as error:
        fault = error.detail
    histogram = None if statistics is None else (statistics.statistics or {}).get("histogram")
    with named.readable.problems():
        states = OptimizerStates(named.readable.opened.whole_index)
    panels = [
        _panel(kept, named, data, caller, most_bytes) for kept in islice(states.beside(named.of.fqn), _PANELS)
    ]
    return {
        "statistics": statistics,
        "fault": fault,
        "histogram": histogram_picture({named.of.fqn: histogram}),
        "mark": None if statistics is None else mark_of(statistics.dtype, statistics.statistics),
        "panels": panels,
        "is_state": states.is_state(named.of.fqn),
    }


def _statistics(
    readable: Readable,
    fqn: str,
    data: DataAccess,
    caller: Principal,
    most_bytes: int,
    *,
    with_histogram: bool = False,
) -> TensorStatistics | None:
    """As a job has computed them; else, or without the histogram that is wanted, read now, if that is not
    too much. None if it is."""
    from dcp.server.features.tensors.grids import tensor_statistics

    kept = kept_statistics(data.service, readable.row.id, fqn, caller)
    if kept is not None and not (with_histogram and (kept.statistics or {}).get("histogram") is None):
        return kept
    index = readable.opened.index
    row = readable.opened.row(fqn)
    if math.prod(index.shape(row)) * index.dtype(row).itemsize > most_bytes:
        return kept
    with readable.problems():
        return tensor_statistics(readable.opened, fqn)


def _panel(kept: KeptState, named: Named, data: DataAccess, caller: Principal, most_bytes: int) -> Panel:
    index = named.readable.opened.index
    names: Iterable[tuple[str | None, str]] = [*((None, fqn) for fqn in kept.weights), *kept.states.items()]
    found: dict[str, Any] = {}
    rows: list[PanelRow] = []
    for state, fqn in islice(names, _PANEL_ROWS):
        if fqn not in index.position:
            continue
        try:
            of = _statistics(named.readable, fqn, data, caller, most_bytes if len(rows) < _READ_ROWS else 0)
        except ProblemError:
            of = None
        values = None if of is None else of.statistics
        if state is not None:
            found[state] = values
        row = index.position[fqn]
        dtype = index.dtype(row).name
        rows.append(PanelRow(state, fqn, dtype, index.shape(row), values, mark_of(dtype, values)))
    weights = [row.values for row in rows if row.state is None]
    weight = weights[0] if len(weights) == 1 else None
    return Panel(kept, tuple(rows), *_moments(found, weight, kept.betas))


def _moments(
    found: dict[str, Any], weight: Any, betas: tuple[float, float] | None
) -> tuple[float | None, float | None, float | None, bool]:
    """The root mean square of gradient and weight, and how much of the gradient points the same way.

    The bias of the moments is corrected as Adam does it (Kingma and Ba, 2015, algorithm 1), where its step is
    known; without that the two are not to be compared.
    """
    first, second, step = (found.get(name) for name in ("exp_avg", "exp_avg_sq", "step"))
    of_weight = None if weight is None else rms_of(weight)
    if second is not None and second["nans"] + second["infs"]:
        return math.nan if second["nans"] else math.inf, of_weight, None, False
    if second is None or second["mean"] is None or second["mean"] < 0:
        return None, of_weight, None, False
    steps = step["min"] if step is not None and step["count"] == 1 else None
    if betas is None or not steps or steps < 1:
        return math.sqrt(second["mean"]), of_weight, None, False
    biases = [1 - beta**steps for beta in betas]
    gradient = math.sqrt(second["mean"] / biases[1])
    own = None if first is None else rms_of(first)
    alike = own / biases[0] / gradient if own is not None and gradient else None
    return gradient, of_weight, alike, True


@router.post("/checkpoints/{checkpoint_id}/statistics", dependencies=[requires("read")])
def statistics_form(
    checkpoint_id: IdPath, form: FormDep, service: ServiceDep, author: Author, transact: IdempotentDep
) -> Response:
    """Have the statistics of all its tensors computed, and go back to where that was asked for."""
    stats_api.compute_statistics(checkpoint_id, service, author, transact, Response())
    fqn = form.optional("fqn")
    query = f"tensors?{urlencode({'fqn': fqn})}" if fqn else "layers"
    return RedirectResponse(f"/checkpoints/{checkpoint_id}/{query}", 303)


# -- a slice -------------------------------------------------------------------------------------------------


@router.get(_TENSOR + "/slice", dependencies=READ)
def slice_page(named: NamedDep, request: Request, value: GridValue = "mean") -> Response:
    """A matrix of it as coloured cells; ``d0``, ``d1`` and so on say what of each dimension."""
    shape = named.of.shape
    given = request.query_params
    parts = [given.get(f"d{at}", usual) for at, usual in enumerate(default_parts(shape))]
    grid, fault = None, None
    try:
        grid = _grid(named, parts)
    except ProblemError as error:
        if error.status != UnprocessableError.status:
            raise
        fault = error.detail
    query = {"fqn": named.fqn, **({"slice": ",".join(parts)} if parts else {})}
    return page(
        request,
        "tensor_slice.html",
        twin=f"/api/v1/checkpoints/{named.found.id}/tensors/grid?{urlencode({**query, 'value': value})}",
        named=named,
        found=named.found,
        tensor=named.of,
        dims=parts,
        is_zoomed=parts != default_parts(shape),
        value=value,
        grid=grid,
        heat=None if grid is None else heat_of(grid, value),
        spans=[] if grid is None else spans_of(parts, shape, (grid.rows, grid.columns)),
        fault=fault,
        cells=f"/api/v1/checkpoints/{named.found.id}/tensors/grid?"
        + urlencode([*query.items(), ("value", value), ("value", "nonfinite")]),
    )


def _grid(named: Named, parts: list[str]) -> Any:
    from dcp.server.features.tensors.grids import tensor_grid

    slices = parse_slices(",".join(parts))
    with named.readable.problems():
        return tensor_grid(named.readable.opened, named.of.fqn, slices, rows=_CELLS, columns=_CELLS)


# -- other steps ---------------------------------------------------------------------------------------------


@router.get(_TENSOR + "/steps", dependencies=READ)
def steps_page(named: NamedDep, request: Request, database: Db, data: DataDep, caller: Caller) -> Response:
    """The tensor in the checkpoints of the run around this one, with what is known of its values there."""
    rows: list[tuple[CheckpointAnswer, Any, float | None, Any]] = []
    for one in _around(named, database, caller):
        found = _values_at(one, named, data, caller)
        values = None if found is None else found.statistics
        if found is None or values is None:
            rows.append((one, None, None, None))
        else:
            rows.append((one, values, largest_of(values), mark_of(found.dtype, values)))
    query = {"run_id": named.found.run_id, "tensor": named.fqn, "sort": "step"}
    known = [(values, largest) for _, values, largest, _ in rows if values is not None]
    return page(
        request,
        "tensor_steps.html",
        twin=f"/api/v1/checkpoints?{urlencode(query)}" if _is_plain(named.fqn) else _twin(named),
        named=named,
        found=named.found,
        rows=rows,
        norms=polyline([values["norm"] for values, _ in known if values["norm"] is not None]),
        largest=polyline([largest for _, largest in known if largest is not None and math.isfinite(largest)]),
        known=len(known),
    )


def _values_at(
    one: CheckpointAnswer, named: Named, data: DataAccess, caller: Principal
) -> TensorStatistics | None:
    """As a job has computed them, or read now, of a small tensor in a small checkpoint."""
    if named.stored_bytes > _SMALL_BYTES or (named.found.tensor_count or 0) > _SMALL_COUNT:
        return kept_statistics(data.service, one.id, named.of.fqn, caller)
    try:
        return _statistics(data.open(one.id, caller), named.of.fqn, data, caller, _SMALL_BYTES)
    except ProblemError:  # its own page says what is wrong with it
        return None


def _around(named: Named, database: Db, caller: Principal) -> list[CheckpointAnswer]:
    """By step, this one among them."""
    step = named.found.step
    if step is None or not _is_plain(named.fqn):
        return [named.found]
    wanted: dict[str, Any] = {"run_id": named.found.run_id, "tensor": named.fqn, "limit": _STEPS // 2}
    later = query_of(CheckpointQuery, **wanted, sort="step", min_step=step)
    earlier = query_of(CheckpointQuery, **wanted, sort="-step", max_step=max(0, step - 1))
    before = checkpoints_api.list_checkpoints(earlier, database, caller).items if step else []
    return [*before[::-1], *checkpoints_api.list_checkpoints(later, database, caller).items]
