"""One checkpoint by what people call it: its key, or the step or an alias of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, select

from dcp.server.catalog.details import CheckpointDetail, get_checkpoint
from dcp.server.catalog.errors import InvalidQueryError, MissingError
from dcp.server.database.tables import aliases, checkpoints, roots, runs

__all__ = ["CheckpointName", "find_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointName:
    """A ``key``; or a ``run`` with a ``step`` or an ``alias``, or with neither: its latest step. ``root``
    where several have the same. Raises `InvalidQueryError` for anything else."""

    root: str | None = None
    key: str | None = None
    run: str | None = None
    step: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        if (self.key is None) == (self.run is None):
            raise InvalidQueryError("key", "one of key and run is needed")
        if self.key is not None and (self.step is not None or self.alias is not None):
            raise InvalidQueryError("key", "a key needs no step and no alias; those are of a run")
        if self.step is not None and self.alias is not None:
            raise InvalidQueryError("step", "one of step and alias at most")
        for field in ("root", "key", "run", "alias"):
            if "\x00" in (getattr(self, field) or ""):
                raise InvalidQueryError(field, "there is a NUL in it")

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def find_checkpoint(
    connection: Connection, name: CheckpointName, visible: frozenset[str] | None = None
) -> CheckpointDetail:
    """The checkpoint that is called so. Of several, as in other roots or formats: a committed one before
    others, and of those the newest. `MissingError` if there is none that may be seen."""
    query = _matching(name)
    if name.root is not None:
        query = query.where(roots.c.name == name.root)
    if visible is not None:
        query = query.where(roots.c.name.in_(sorted(visible)))
    is_other = checkpoints.c.state != "committed"
    order = [is_other, checkpoints.c.committed_seconds.desc(), checkpoints.c.id.desc()]
    if name.run is not None and name.step is None and name.alias is None:
        order.insert(1, checkpoints.c.step_order.desc())
    number = connection.execute(query.order_by(*order).limit(1)).scalar()
    if number is None:
        raise MissingError("checkpoint", str(name))
    return get_checkpoint(connection, number, visible)


def _matching(name: CheckpointName) -> Select[Any]:
    query = select(checkpoints.c.id).join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
    if name.key is not None:
        last = name.key.rpartition("/")[2]  # has an index
        return query.where(checkpoints.c.name == last, checkpoints.c.key == name.key)
    query = query.join(runs, runs.c.id == checkpoints.c.run_id).where(runs.c.key == name.run)
    if name.step is not None:
        return query.where(checkpoints.c.step_order == name.step)
    if name.alias is not None:
        query = query.join(aliases, aliases.c.checkpoint_id == checkpoints.c.id)
        return query.where(aliases.c.run_id == runs.c.id, aliases.c.name == name.alias)
    return query
