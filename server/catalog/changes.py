"""Changes of checkpoint rows: results of scans and registrations, and states.

Each change increments ``version`` (the ETag), updates the sums of the run, and writes events, in the
transaction of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, select, update

from dcp.server.catalog import audit
from dcp.server.catalog.details import bump, get_checkpoint, labels_of, lock_checkpoint
from dcp.server.catalog.errors import InvalidQueryError, StateError
from dcp.server.catalog.events import NewEvent, checkpoint_event, emit_all
from dcp.server.catalog.facts import CheckpointFacts, Upserted, announcement, change_of
from dcp.server.catalog.runs import SumChanges, ensure_runs, root_id
from dcp.server.catalog.structures import ensure_structures
from dcp.server.database.engine import dialect_insert, insert_missing, insert_or_update
from dcp.server.database.tables import checkpoint_names, checkpoints, metrics, tags
from dcp.server.records.checkpoints import CheckpointDetail, State

_CHUNK: Final = 500
_ROUNDS: Final = 3

_Place = tuple[int, str]

_NEXT: Final[Mapping[str, frozenset[str]]] = {
    "incomplete": frozenset({"committed", "unreadable", "vanished", "deleted"}),
    "committed": frozenset({"incomplete", "unreadable", "vanished", "deleted"}),
    "unreadable": frozenset({"committed", "incomplete", "vanished", "deleted"}),
    "vanished": frozenset({"committed", "incomplete", "unreadable", "deleted"}),
    "deleted": frozenset({"committed", "incomplete", "unreadable", "vanished", "purged"}),
    "purged": frozenset(),
}


def upsert_checkpoint(
    connection: Connection, facts: CheckpointFacts, *, now: float | None = None, actor: str | None = None
) -> Upserted:
    """Write the facts of one checkpoint; see `upsert_checkpoints`."""
    return upsert_checkpoints(connection, [facts], now=now, actor=actor)[0]


def upsert_checkpoints(
    connection: Connection,
    facts: Sequence[CheckpointFacts],
    *,
    now: float | None = None,
    actor: str | None = None,
) -> list[Upserted]:
    """Write the facts of checkpoints with distinct keys, and return one result for each, in order.

    Creates runs and structures as needed, updates sums, and emits "checkpoint.committed" for new content.
    With ``actor`` each change is audited; scans pass none. Raises `MissingError` for a root unknown to
    `sync_roots`.
    """
    now = time.time() if now is None else now
    roots = {name: root_id(connection, name) for name in sorted({one.root for one in facts})}
    by_place = {(roots[one.root], one.key): one for one in facts}
    if len(by_place) != len(facts):
        raise InvalidQueryError("key", "the request contains the checkpoint twice")
    batch = _Batch(connection, now, actor, roots)
    places = sorted(by_place)
    for start in range(0, len(places), _CHUNK):
        batch.write({place: by_place[place] for place in places[start : start + _CHUNK]})
    batch.finish()
    return [batch.done[roots[one.root], one.key] for one in facts]


class _Batch:
    def __init__(
        self, connection: Connection, now: float, actor: str | None, roots: Mapping[str, int]
    ) -> None:
        self.connection = connection
        self.now = now
        self.actor = actor
        self.roots = roots
        self.done: dict[_Place, Upserted] = {}
        self.ignored: set[_Place] = set()
        self.sums = SumChanges()
        self.events: list[NewEvent] = []

    def write(self, facts: Mapping[_Place, CheckpointFacts]) -> None:
        connection = self.connection
        structures = ensure_structures(
            connection, [one.structure for one in facts.values() if one.structure is not None]
        )
        runs = ensure_runs(
            connection, {(place[0], one.run_key) for place, one in facts.items()}, now=self.now
        )
        columns = {
            place: one.columns()
            | {"structure_id": None if one.structure is None else structures[one.structure.digest]}
            for place, one in facts.items()
        }
        left = set(facts)
        for _ in range(_ROUNDS):
            for place, row in self._rows(left).items():
                self._update(place, row, facts[place], columns[place])
                left.discard(place)
            new = {
                place: columns[place]
                | {"run_id": runs[place[0], facts[place].run_key], "name": facts[place].name}
                for place in sorted(left)
            }
            left -= self._insert(new, facts)
            if not left:
                break  # another process inserted the runs in the meantime
        else:
            raise AssertionError("the row exists and does not exist")
        self._add_labels(facts, runs)

    def finish(self) -> None:
        self.sums.write(self.connection, now=self.now)
        emit_all(self.connection, self.events, now=self.now)

    def _rows(self, places: Iterable[_Place]) -> dict[_Place, dict[str, Any]]:
        found: dict[_Place, dict[str, Any]] = {}
        keys: dict[int, list[str]] = {}
        for root, key in sorted(places):
            keys.setdefault(root, []).append(key)
        for root, of_root in keys.items():
            query = (
                select(checkpoints)
                .where(checkpoints.c.root_id == root, checkpoints.c.key.in_(of_root))
                .order_by(checkpoints.c.id)
                .with_for_update()
            )
            found |= {(root, row["key"]): dict(row) for row in self.connection.execute(query).mappings()}
        return found

    def _insert(
        self, new: Mapping[_Place, dict[str, Any]], facts: Mapping[_Place, CheckpointFacts]
    ) -> set[_Place]:
        if not new:
            return set()
        rows = []
        for (root, key), columns in new.items():
            observed = facts[root, key].observed_seconds
            committed = columns["committed_seconds"]
            rows.append(
                columns
                | {
                    "root_id": root,
                    "key": key,
                    "committed_seconds": observed if committed is None else committed,
                    "observed_seconds": observed,
                    "announced": announcement(columns) if columns["state"] == "committed" else None,
                    "discovered_seconds": self.now,
                    "updated_seconds": self.now,
                    "is_pinned": bool(columns["is_pinned"]),
                }
            )
        statement = dialect_insert(self.connection, checkpoints).on_conflict_do_nothing()
        inserted = self.connection.execute(
            statement.returning(checkpoints.c.id, checkpoints.c.root_id, checkpoints.c.key), rows
        ).all()
        for number, root, key in inserted:
            one = facts[root, key]
            self._did((root, key), number, one, is_new=True, committed=one.state == "committed")
            self.sums.count(None, new[root, key] | {"root_id": root})
        names = sorted({facts[root, key].name for _, root, key in inserted})
        insert_missing(self.connection, checkpoint_names, [{"name": name} for name in names])
        return {(root, key) for _, root, key in inserted}

    def _update(
        self, place: _Place, row: dict[str, Any], facts: CheckpointFacts, columns: Mapping[str, Any]
    ) -> None:
        change = change_of(row, facts, columns)
        if change.is_ignored:
            self.ignored.add(place)
        if not change.columns:
            self.done[place] = Upserted(row["id"], is_new=False, is_changed=False, became_committed=False)
            return
        bump(self.connection, row["id"], self.now, **change.columns)
        if change.is_other_save:
            self.connection.execute(delete(metrics).where(metrics.c.checkpoint_id == row["id"]))
        self.sums.count(row, row | change.columns)
        self._did(place, row["id"], facts, is_new=False, committed=change.became_committed)

    def _did(
        self, place: _Place, number: int, facts: CheckpointFacts, *, is_new: bool, committed: bool
    ) -> None:
        self.done[place] = Upserted(number, is_new, is_changed=True, became_committed=committed)
        if committed:
            data = {
                "root": facts.root,
                "run": facts.run_key,
                "key": facts.key,
                "step": facts.step,
                "format": facts.format,
            }
            self.events.append(NewEvent("checkpoint.committed", place[0], number, data))
        if self.actor is not None:
            action = "checkpoint.register" if is_new else "checkpoint.update"
            detail = {"root": facts.root, "key": facts.key, "state": facts.state}
            about = f"checkpoint:{number}", detail
            audit.record(self.connection, self.actor, action, *about, now=self.now, root=facts.root)

    def _add_labels(self, facts: Mapping[_Place, CheckpointFacts], runs: Mapping[_Place, int]) -> None:
        """Add new tags and metrics. For an otherwise unchanged checkpoint they count as a change."""
        labelled = {
            place: one
            for place, one in facts.items()
            if (one.tags or one.metrics) and place not in self.ignored
        }
        known = labels_of(self.connection, [self.done[place].id for place in labelled])
        new_tags: list[dict[str, Any]] = []
        new_metrics: list[dict[str, Any]] = []
        for place, one in labelled.items():
            done = self.done[place]
            has = known[done.id]
            more_tags = sorted(one.tags - set(has["tags"]))
            more_metrics = {name: x for name, x in one.metrics.items() if has["metrics"].get(name) != x}
            new_tags += [
                {"checkpoint_id": done.id, "tag": tag, "created_seconds": self.now} for tag in more_tags
            ]
            new_metrics += [
                {"checkpoint_id": done.id, "name": name, "value": float(x)}
                for name, x in sorted(more_metrics.items())
            ]
            if (more_tags or more_metrics) and not done.is_changed:
                bump(self.connection, done.id, self.now)
                self._did(place, done.id, one, is_new=False, committed=False)
            if more_tags or more_metrics:
                self.sums.touch(runs[place[0], one.run_key])
        insert_missing(self.connection, tags, new_tags)
        insert_or_update(self.connection, metrics, new_metrics)


def set_state(
    connection: Connection,
    checkpoint_id: int,
    state: State,
    *,
    actor: str,
    now: float | None = None,
    problem: str | None = None,
    purge_after_seconds: float | None = None,
) -> CheckpointDetail:
    """Set the state with its fields, and return the changed checkpoint.

    ``purge_after_seconds`` (a time) belongs to "deleted". Emits "checkpoint.deleted" and writes an audit
    entry. Setting the current state does nothing.

    Raises:
        MissingError: The checkpoint does not exist or is not visible.
        ChangedError: The version differs.
        StateError: The transition is not allowed, or the checkpoint to delete is pinned.
    """
    now = time.time() if now is None else now
    row = lock_checkpoint(connection, checkpoint_id)
    if row["state"] == state:
        return get_checkpoint(connection, checkpoint_id)
    if state not in _NEXT[row["state"]]:
        raise StateError(
            f"checkpoint {checkpoint_id} is {row['state']} and cannot become {state}", state=row["state"]
        )
    if state == "deleted" and row["is_pinned"]:
        raise StateError(f"checkpoint {checkpoint_id} is pinned: unpin it first", state=row["state"])
    bump(
        connection,
        checkpoint_id,
        now,
        state=state,
        observed_seconds=now,
        problem=problem,
        deleted_seconds={"deleted": now, "purged": row["deleted_seconds"]}.get(state),
        purge_after_seconds=purge_after_seconds if state == "deleted" else None,
    )
    sums = SumChanges()
    sums.count(row, {**row, "state": state})
    sums.write(connection, now=now)
    before = {"from": row["state"], "to": state, "root": row["root"], "key": row["key"]}
    about = f"checkpoint:{checkpoint_id}", before
    audit.record(connection, actor, "checkpoint.state", *about, now=now, root=row["root"])
    if state == "deleted":
        event = checkpoint_event("checkpoint.deleted", row, purge_after_seconds=purge_after_seconds)
        emit_all(connection, [event], now=now)
    return get_checkpoint(connection, checkpoint_id)


def mark_vanished(
    connection: Connection,
    root: str,
    keys: Iterable[str],
    *,
    observed_seconds: float,
    now: float | None = None,
) -> int:
    """Mark checkpoints as missing at ``observed_seconds``, and return the number of changes.

    Checkpoints seen since then, and deleted ones, stay unchanged.
    """
    now = time.time() if now is None else now
    number = root_id(connection, root)
    wanted = sorted(set(keys))
    gone: list[int] = []
    sums = SumChanges()
    for start in range(0, len(wanted), _CHUNK):
        query = (
            select(*(checkpoints.c[name] for name in ("id", "root_id", "run_id", "owner", "state", "bytes")))
            .where(
                checkpoints.c.root_id == number,
                checkpoints.c.key.in_(wanted[start : start + _CHUNK]),
                checkpoints.c.state.in_(("incomplete", "committed", "unreadable")),
                checkpoints.c.observed_seconds <= observed_seconds,
            )
            .order_by(checkpoints.c.id)
            .with_for_update()
        )
        for row in connection.execute(query):
            gone.append(row.id)
            sums.count(row._mapping, None)
    if gone:
        connection.execute(
            update(checkpoints)
            .where(checkpoints.c.id == bindparam("number"))
            .values(
                state="vanished",
                version=checkpoints.c.version + 1,
                updated_seconds=now,
                observed_seconds=observed_seconds,
            ),
            [{"number": one} for one in gone],
        )
        sums.write(connection, now=now)
    return len(gone)
