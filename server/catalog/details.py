"""Checkpoints as they are shown: a row with its labels, and all that is known of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, select, update

from dcp.server.catalog.errors import ChangedError, MissingError
from dcp.server.database.tables import aliases, checkpoints, metrics, roots, runs, structures, tags

__all__ = [
    "Checkpoint",
    "CheckpointDetail",
    "get_checkpoint",
    "joined",
    "lock_checkpoint",
    "row_columns",
    "with_labels",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint with its labels. ``run`` is the key of the run, ``key`` that of the checkpoint.

    ``dtypes``: bytes by dtype; None where the structure is not known.
    """

    id: int
    root: str
    run_id: int
    run: str
    key: str
    name: str
    step: int | None
    format: str
    state: str
    committed_seconds: float
    discovered_seconds: float
    updated_seconds: float
    deleted_seconds: float | None
    purge_after_seconds: float | None
    bytes: int
    file_count: int
    world_size: int | None
    structure_id: int | None
    dtypes: dict[str, int] | None
    verification: str
    verified_seconds: float | None
    problem: str | None
    is_pinned: bool
    version: int
    tags: tuple[str, ...]
    aliases: tuple[str, ...]
    metrics: Mapping[str, float]

    @property
    def etag(self) -> str:
        """The entity tag, with quotes."""
        return f'"c{self.id}-{self.version}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDetail(Checkpoint):
    """All that is known of a checkpoint. What is of the structure is None where that is not known."""

    save_id: str | None
    fingerprint: str | None
    user_metadata: Any
    provenance: Any
    structure_digest: str | None
    tensor_count: int | None
    object_count: int | None
    element_count: int | None


_OWN: Final = (
    "id",
    "run_id",
    "key",
    "name",
    "step",
    "format",
    "state",
    "committed_seconds",
    "discovered_seconds",
    "updated_seconds",
    "deleted_seconds",
    "purge_after_seconds",
    "bytes",
    "file_count",
    "world_size",
    "structure_id",
    "verification",
    "verified_seconds",
    "problem",
    "is_pinned",
    "version",
)


def row_columns() -> list[Any]:
    """The columns of a `Checkpoint` but for its labels, of the tables that `joined` joins."""
    return [
        *(checkpoints.c[name] for name in _OWN),
        roots.c.name.label("root"),
        runs.c.key.label("run"),
        structures.c.dtypes,
    ]


def joined(query: Select[Any]) -> Select[Any]:
    """``query`` on checkpoints, with the root, the run and the structure of each."""
    return (
        query.join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .outerjoin(structures, structures.c.id == checkpoints.c.structure_id)
    )


def get_checkpoint(
    connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None
) -> CheckpointDetail:
    """All of a checkpoint; `MissingError` if there is none that may be seen."""
    query = joined(
        select(
            *row_columns(),
            checkpoints.c.save_id,
            checkpoints.c.fingerprint,
            checkpoints.c.user_metadata,
            checkpoints.c.provenance,
            structures.c.digest.label("structure_digest"),
            structures.c.tensor_count,
            structures.c.object_count,
            structures.c.element_count,
        )
    ).where(checkpoints.c.id == checkpoint_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or (visible is not None and row["root"] not in visible):
        raise MissingError("checkpoint", checkpoint_id)
    return CheckpointDetail(**row, **labels_of(connection, [checkpoint_id])[checkpoint_id])


def with_labels(connection: Connection, rows: Sequence[Mapping[Any, Any]]) -> list[Checkpoint]:
    """Rows of `row_columns` as checkpoints, in the same order."""
    labels = labels_of(connection, [row["id"] for row in rows])
    return [Checkpoint(**row, **labels[row["id"]]) for row in rows]


def lock_checkpoint(
    connection: Connection,
    checkpoint_id: int,
    visible: frozenset[str] | None = None,
    expected_version: int | None = None,
) -> Mapping[Any, Any]:
    """The row with ``root`` and ``run``; nobody else changes it before this transaction ends.

    Raises `MissingError`, and `ChangedError` if it is not in ``expected_version``.
    """
    query = (
        select(checkpoints, roots.c.name.label("root"), runs.c.key.label("run"))
        .join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .where(checkpoints.c.id == checkpoint_id)
        .with_for_update(of=checkpoints)
    )
    row = connection.execute(query).mappings().one_or_none()
    if row is None or (visible is not None and row["root"] not in visible):
        raise MissingError("checkpoint", checkpoint_id)
    if expected_version is not None and row["version"] != expected_version:
        raise ChangedError("checkpoint", checkpoint_id, expected=expected_version, version=row["version"])
    return row


def bump(connection: Connection, checkpoint_id: int, now: float) -> None:
    """Something about the checkpoint has changed: another version."""
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.id == checkpoint_id)
        .values(version=checkpoints.c.version + 1, updated_seconds=now)
    )


def labels_of(connection: Connection, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
    """By id: ``tags`` and ``aliases`` (sorted), and ``metrics``."""
    wanted = list(numbers)
    found: dict[int, dict[str, Any]] = {
        number: {"tags": (), "aliases": (), "metrics": {}} for number in wanted
    }
    if not wanted:
        return found
    tagged = select(tags.c.checkpoint_id, tags.c.tag).where(tags.c.checkpoint_id.in_(wanted))
    for number, tag in connection.execute(tagged):
        found[number]["tags"] += (tag,)
    named = select(aliases.c.checkpoint_id, aliases.c.name).where(aliases.c.checkpoint_id.in_(wanted))
    for number, name in connection.execute(named):
        found[number]["aliases"] += (name,)
    measured = select(metrics.c.checkpoint_id, metrics.c.name, metrics.c.value)
    for number, metric, value in connection.execute(measured.where(metrics.c.checkpoint_id.in_(wanted))):
        found[number]["metrics"][metric] = value
    for labels in found.values():
        labels["tags"] = tuple(sorted(labels["tags"]))
        labels["aliases"] = tuple(sorted(labels["aliases"]))
        labels["metrics"] = dict(sorted(labels["metrics"].items()))
    return found
