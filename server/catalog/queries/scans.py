"""What a scanner asks of the catalog: which checkpoints of a run are known, and as what."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from dcp.server.catalog.roots import root_id
from dcp.server.database.tables import checkpoints, runs

__all__ = ["Known", "known_of_run", "run_keys"]


@dataclass(frozen=True, slots=True)
class Known:
    """What tells whether a checkpoint has to be looked at again."""

    state: str
    fingerprint: str | None


def known_of_run(connection: Connection, root: str, run_key: str) -> dict[str, Known]:
    """The checkpoints of a run by their names, gone ones too; empty for a run that is not known.

    Raises `MissingError` for a root that is not.
    """
    query = (
        select(checkpoints.c.name, checkpoints.c.state, checkpoints.c.fingerprint)
        .join(runs, runs.c.id == checkpoints.c.run_id)
        .where(runs.c.root_id == root_id(connection, root), runs.c.key == run_key)
    )
    return {name: Known(state, fingerprint) for name, state, fingerprint in connection.execute(query)}


def run_keys(connection: Connection, root: str) -> list[str]:
    """The keys of all runs of a root, sorted."""
    query = select(runs.c.key).where(runs.c.root_id == root_id(connection, root))
    return sorted(connection.execute(query).scalars())
