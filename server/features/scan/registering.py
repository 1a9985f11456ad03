"""Registration by a trainer: it names a checkpoint, and the service reads it.

Nothing that a trainer could be wrong about is taken from its request: the state, size and structure are read
from storage, so that a registration that comes twice or late changes nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import unquote, urlsplit

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from sqlalchemy import Connection

from dcp.server.catalog.checkpoints import mark_vanished, upsert_checkpoint
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.inputs import MAX_ID, Finite, Name, Request, Text
from dcp.server.catalog.labels import MAX_LABELS
from dcp.server.catalog.source_facts import step_of_name
from dcp.server.catalog.structures import prepare_structures
from dcp.server.core.problems import ConflictError, NotFoundError
from dcp.server.core.roots import Roots, StorageRoot, check_key
from dcp.server.database.engine import Database
from dcp.server.features.scan.reading import Reader
from dcp.server.features.scan.walk import Candidate, classify
from dcp.server.records.checkpoints import Registered
from dcp.storage.errors import CheckpointError

__all__ = ["Registration", "observe", "place_of"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)


class Registration(Request):
    """A checkpoint that a trainer has saved, or (``deleted``) has deleted.

    The service reads it: whether it is committed, its size and structure are never taken from the request.
    One of ``root`` and ``root_url`` (the URL of the folder that holds it) is needed.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"root": "main", "key": "run/step-1", "tags": ["nightly"], "metrics": {"loss": 2.5}}]
        }
    )

    root: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = None
    root_url: Annotated[Text, StringConstraints(min_length=1)] | None = None
    key: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    step: Annotated[int, Field(ge=0, le=MAX_ID)] | None = None
    save_id: Annotated[Text, StringConstraints(min_length=1, max_length=64)] | None = None
    tags: Annotated[list[Name], Field(max_length=MAX_LABELS)] = Field(default_factory=list)
    metrics: Annotated[dict[Name, Finite], Field(max_length=MAX_LABELS)] = Field(default_factory=dict)
    deleted: bool = False

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if (self.root is None) == (self.root_url is None):
            raise ValueError("one of root and root_url is needed")
        return self


def observe(
    database: Database,
    roots: Roots,
    registration: Registration,
    *,
    actor: str,
    visible: frozenset[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> Callable[[Connection], Registered]:
    """Read the checkpoint. Returns a function that writes it to the catalog, in a transaction. A large
    structure, which belongs to no checkpoint alone, is written here, in many short transactions.

    Raises NotFoundError for a root that is missing (or not ``visible``) and where nothing is stored,
    ConflictError where nothing is committed (the trainer may ask again), UnprocessableError for a key that is
    not clean, UnavailableError where the storage does not answer, and the catalog's errors.
    """
    if registration.root_url is None:
        root, key = _in_root(roots, registration.root or "", visible), check_key(registration.key)
    else:
        root, key = _at_url(roots, registration.root_url, registration.key, visible)
    observed = clock()  # before reading: a checkpoint that appears meanwhile must not count as gone
    facts = _facts(root, key, clock)
    if registration.deleted and facts is None:

        def forget(connection: Connection) -> Registered:
            mark_vanished(connection, root.name, [key], observed_seconds=observed)
            return Registered(None, root.name, key, is_new=False, is_present=False)

        return forget
    if facts is None:
        raise NotFoundError(f"there is no checkpoint in the storage of root {root.name} under that key")
    if facts.state == "incomplete" and not registration.deleted:
        raise ConflictError(f"nothing is committed in root {root.name} under that key, only data of a save")
    if facts.state == "committed" and not registration.deleted:
        facts = _labelled(facts, registration)
    prepare_structures(database, [facts.structure], clock=clock)
    return partial(_write, facts=facts, actor=actor)


def _write(connection: Connection, facts: CheckpointFacts, actor: str) -> Registered:
    row = upsert_checkpoint(connection, facts, actor=actor)
    return Registered(row.id, facts.root, facts.key, row.is_new, facts.state == "committed", facts.save_id)


def _labelled(facts: CheckpointFacts, registration: Registration) -> CheckpointFacts:
    step = facts.step
    if registration.step is not None and step in (None, step_of_name(facts.key)):
        step = registration.step
    return replace(
        facts, step=step, tags=frozenset(registration.tags), metrics={**facts.metrics, **registration.metrics}
    )


def _facts(root: StorageRoot, key: str, clock: Callable[[], float]) -> CheckpointFacts | None:
    """Read the facts of a checkpoint; None if there is none. Raises a ProblemError."""
    try:
        candidate = _candidate(root, key)
        return None if candidate is None else Reader(root, clock=clock).facts(candidate)
    except (CheckpointError, OSError) as error:
        raise root.problem(error) from error


def _candidate(root: StorageRoot, key: str) -> Candidate | None:
    place = root.place(key)
    if place.file is not None:
        info = place.store.stat(place.file)
        return None if info is None else Candidate(key, "file", (info,))
    found = classify(key, {info.name: info for info in place.store.list()})
    return next((candidate for candidate in found if candidate.key == key), None)


def place_of(roots: Roots, url: str, visible: frozenset[str] | None = None) -> tuple[str, str]:
    """Find the name of the root that holds the path or URL ``url``, and the key in it. Raises NotFoundError,
    UnprocessableError."""
    folder, _, name = url.rstrip("/").rpartition("/")
    root, key = _at_url(roots, folder, name, visible)
    return root.name, key


def _in_root(roots: Roots, name: str, visible: frozenset[str] | None) -> StorageRoot:
    if visible is not None and name not in visible:
        raise NotFoundError(f"there is no root {name[:64]!r}")
    return roots.get(name)


def _at_url(roots: Roots, url: str, key: str, visible: frozenset[str] | None) -> tuple[StorageRoot, str]:
    """Find the innermost root that holds the folder ``url``, and the key in it."""
    place = _normal(url)
    found = [
        (inner, root)
        for root in roots
        if visible is None or root.name in visible
        for inner in (_below(place, own) for own in _places_of(root))
        if inner is not None
    ]
    if not found:
        raise NotFoundError("no root holds that URL; ask the operator to configure one")
    inner, root = min(found, key=lambda one: len(one[0]))
    return root, check_key(f"{inner}/{key}" if inner else key)


def _places_of(root: StorageRoot) -> set[str]:
    if root.path is None:
        return {_normal(root.url)}
    return {str(root.path), os.path.realpath(root.path)}


def _normal(url: str) -> str:
    """Return a URL as text that can be compared: paths absolute and without links, ``s3a`` as ``s3``."""
    match = _URL.fullmatch(url)
    if match is None:
        return os.path.realpath(url) if Path(url).is_absolute() else ""
    scheme = match[1].lower()
    if scheme == "file":
        try:
            return os.path.realpath(unquote(urlsplit(url).path))
        except ValueError:  # such as file://[
            return ""
    return f"{'s3' if scheme == 's3a' else scheme}://{match[2].rstrip('/')}"


def _below(place: str, root: str) -> str | None:
    """Return the part of ``place`` that is below ``root``, "" for the root itself; None if it is
    elsewhere."""
    root = root.rstrip("/")
    if place == root:
        return ""
    return place[len(root) + 1 :] if place.startswith(f"{root}/") else None
