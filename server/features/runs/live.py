"""Running training: expected time of the next checkpoint, and a stream of changes of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, pairwise, repeat
from statistics import median
from typing import Annotated, Final, Literal

from sqlalchemy import Connection, select
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from dcp.server.catalog.runs import get_run
from dcp.server.core.answers import IdPath, rfc3339_of
from dcp.server.core.ask import Ask
from dcp.server.core.streams import OVER, Feed, Following, News, described_stream, stream_of
from dcp.server.database.tables import checkpoints, lineage, runs
from dcp.server.features.runs import feature
from dcp.server.records.declaring import OneOf, Shown, moment

_GAPS: Final = 20
_FEWEST: Final = 3
"""Number of checkpoints required for an interval."""
_STALLED: Final = 3.0
_STALLED_MOST: Final = 1.5
"""Multiple of the longest recent interval, for runs with irregular saves."""
_ENDED: Final = 20.0
_SOONEST_SECONDS: Final = 60.0
"""Shortest time without a save before a run counts as stalled."""

Activity = Literal["training", "stalled", "ended", "unknown"]


@dataclass(frozen=True, slots=True)
class RunActivity:
    """Intervals between saves of a run, from its newest checkpoints not made by jobs.

    training: the next checkpoint is expected; stalled: overdue by three usual intervals; ended: by twenty;
    unknown: fewer than three checkpoints.
    """

    run_id: int
    state: Annotated[
        str,
        OneOf(Activity),
        Shown(
            "training: the next checkpoint is expected. stalled: overdue. ended: long overdue. "
            "unknown: fewer than three checkpoints."
        ),
    ]
    last_at: Annotated[datetime | None, Shown("When the newest checkpoint was committed.")]
    interval_seconds: Annotated[float | None, Shown("Median between the newest checkpoints.")]
    expected_at: Annotated[
        datetime | None, Shown("Expected time of the next checkpoint, for a run in training.")
    ]
    changes_at: Annotated[
        datetime | None, Shown("Time at which the run counts as stalled or ended without another checkpoint.")
    ]


@feature.get("/runs/{run_id}/activity", tag="runs")
def get_run_activity(run_id: IdPath, ask: Ask) -> RunActivity:
    """Return the state of training from the checkpoints of a run: their interval, and the next expected
    checkpoint."""
    with ask.reading() as connection:
        get_run(connection, run_id, ask.visible)
        return activity_of(connection, run_id, ask.now)


def activity_of(connection: Connection, run_id: int, now: float) -> RunActivity:
    """Find the activity of a run at ``now``."""
    column = checkpoints.c
    made = select(lineage.c.child_id).where(lineage.c.child_id == column.id)
    query = (
        select(column.committed_seconds)
        .where(column.run_id == run_id, column.state == "committed", ~made.exists())
        .with_hint(checkpoints, "INDEXED BY ix_checkpoints_run_id_committed_seconds_id", "sqlite")
        .order_by(column.committed_seconds.desc())
        .limit(_GAPS + 1)
    )
    times = list(connection.execute(query).scalars())
    last = times[0] if times else None
    if last is None or len(times) < _FEWEST:
        return RunActivity(run_id, "unknown", last and moment(last), None, None, None)
    gaps = [later - earlier for later, earlier in pairwise(times)]
    interval = max(1.0, median(gaps))
    stalls = last + max(_SOONEST_SECONDS, _STALLED * interval, _STALLED_MOST * max(gaps))
    ends = max(stalls, last + _ENDED * interval)
    state: Activity = "training" if now <= stalls else "stalled" if now <= ends else "ended"
    return RunActivity(
        run_id,
        state,
        moment(last),
        interval,
        moment(last + interval) if state == "training" else None,
        moment({"training": stalls, "stalled": ends}[state]) if state != "ended" else None,
    )


# -- the stream ----------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class _FollowingRun(Following):
    """Follower of a run; ``seen`` is its last delivered change."""

    run_id: int
    seen: float | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of a run; ``id`` is the id of the event."""

    id: int
    updated_seconds: float
    checkpoint_count: int
    latest_step: int | None

    def to_json(self) -> str:
        """Write the data of the event."""
        data = {"run_id": self.id, "updated_at": rfc3339_of(moment(self.updated_seconds))}
        return json.dumps(data | {"checkpoint_count": self.checkpoint_count, "latest_step": self.latest_step})


class RunFeed(Feed[_FollowingRun]):
    """Feed for all followers of runs, with one query."""

    def _look(self, connection: Connection, some: Sequence[_FollowingRun]) -> bool:
        column = runs.c
        query = select(column.id, column.updated_seconds, column.checkpoint_count, column.latest_step)
        found = connection.execute(query.where(column.id.in_({one.run_id for one in some})))
        changes = {row.id: _Change(*row) for row in found}
        for one in some:
            change = changes.get(one.run_id)
            if change is None:
                one.tell(OVER)
            elif change.updated_seconds != one.seen:
                one.seen = change.updated_seconds
                one.tell(News(None, [change]))
        return False


_STREAM: Final = described_stream("`ready` at once, then `changed` with each change.", "with the current run")


@feature.get("/runs/{run_id}/events", tag="runs", responses=_STREAM, errors=(404, 503))
def watch_run(run_id: IdPath, ask: Ask) -> Response:
    """Follow changes of a run as server-sent events: new checkpoints, labels, verdicts, deletions.

    `ready` comes immediately, `changed` with each change; `data` of both is JSON with `run_id`, `updated_at`,
    `checkpoint_count`, and `latest_step`. Comments keep the connection alive. The stream can end at any time:
    reconnect, and read the run again if `updated_at` differs.
    """
    ask.find(get_run, run_id, ask.visible)
    kinds = chain(("ready",), repeat("changed"))

    def shown(news: News) -> Iterator[ServerSentEvent]:
        for change in news.events:
            yield ServerSentEvent(event=next(kinds), data=change.to_json())

    follower = _FollowingRun(caller=ask.caller, run_id=run_id)
    return stream_of(ask, RunFeed, follower, shown, comment="changes of a run")
