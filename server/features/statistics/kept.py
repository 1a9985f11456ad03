"""Statistics of a checkpoint's values: those that a job has computed, and the form that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from dcp.server.catalog.cursors import encode_cursor, offset_of, query_mark
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageQuery
from dcp.server.core.pages.requests import FormDep
from dcp.server.core.problems import NotFoundError
from dcp.server.database.documents import find_item
from dcp.server.features.statistics import (
    Statistics,
    StatsKind,
    StatsParams,
    feature,
    stored_statistics,
    tensors_of,
)
from dcp.server.records.declaring import Shown
from dcp.server.records.jobs import Job

_PATH: Final = "/checkpoints/{checkpoint_id}/statistics"


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
    """Statistics of the values of one tensor. ``is_kept``: computed by a job, at ``computed_at``; else read
    for this answer."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Annotated[Mapping[str, Any] | None, Shown("null: bits that are not numbers.")]
    is_kept: Annotated[bool, Shown("Computed by a job; else read for this answer.")]
    computed_at: Annotated[datetime | None, Shown("By the job.")] = None


@feature.get(_PATH, tag="data")
def get_statistics(checkpoint_id: IdPath, ask: Ask, page: PageQuery) -> Statistics:
    """Return the statistics that are kept; not found before the first computation. A page is of tensors."""
    with ask.reading() as connection:
        found = stored_statistics(connection, checkpoint_id, ask.visible)
        if found is None:
            raise NotFoundError(
                f"no statistics of checkpoint {checkpoint_id} are kept; POST here to compute them"
            )
        mark = query_mark("statistics", checkpoint_id, found.created_at)
        begin = offset_of(page.cursor, mark)
        end = begin + page.limit
        tensors = tuple(tensors_of(connection, found, begin, end))
    return replace(
        found, tensors=tensors, next_cursor=None if end >= found.tensor_count else encode_cursor(mark, end)
    )


@feature.post(_PATH, tag="data", scope="read", status=202, errors=(404, 409, 410))
def compute_statistics(checkpoint_id: IdPath, ask: Ask) -> Job:
    """Compute the statistics of all tensors, by a job; they are kept with the checkpoint."""
    return ask.submit(StatsKind, StatsParams(checkpoint_id=checkpoint_id))


@feature.form(_PATH, scope="read")
def statistics_form(checkpoint_id: IdPath, form: FormDep, ask: Ask) -> str:
    """Compute the statistics of all its tensors, and return to the page with the form."""
    compute_statistics(checkpoint_id, ask)
    fqn = form.optional("fqn")
    below = f"tensors?{urlencode({'fqn': fqn})}" if fqn else "layers"
    return f"/checkpoints/{checkpoint_id}/{below}"


def kept_statistics(ask: Ask, checkpoint_id: int, fqn: str) -> MeasuredTensor | None:
    """Return the statistics of one tensor that a job has computed; None without any, and where the checkpoint
    was replaced since. Raises MissingError."""
    with ask.reading() as connection:
        kept = stored_statistics(connection, checkpoint_id, ask.visible)
        if kept is None or kept.is_stale:
            return None
        found = find_item(connection, kept.document_id, "tensors", "fqn", fqn)
    if found is None:
        return None
    values = found["fqn"], found["dtype"], tuple(found["shape"]), found["statistics"]
    return MeasuredTensor(*values, is_kept=True, computed_at=kept.created_at)
