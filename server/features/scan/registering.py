"""Registration by a trainer: it says where a checkpoint is, and the server looks for itself.

Nothing that a trainer could be wrong about is taken on its word: what is committed, of which size and
structure, is read from storage, so that a registration that comes twice or late changes nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from sqlalchemy import Connection

from dcp.server.catalog.checkpoints import mark_vanished, upsert_checkpoint
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.source_facts import step_of_name
from dcp.server.catalog.structures import prepare_structures
from dcp.server.core.problems import ConflictError, NotFoundError, UnprocessableError
from dcp.server.core.roots import Roots, StorageRoot, check_key
from dcp.server.database.engine import Database
from dcp.server.features.scan.reading import Reader
from dcp.server.features.scan.walk import Candidate, classify
from dcp.server.records.checkpoints import Registered
from dcp.storage.errors import CheckpointError

__all__ = ["Registration", "look_at", "observe", "place_of", "register", "resolve"]

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a trainer says: the checkpoint ``key`` of the root named ``root``, or below the URL ``root_url``.

    ``step`` counts only where the checkpoint says none itself; ``tags`` and ``metrics`` are added.
    ``save_id`` is that of the save it is about: if another one has come since, that is what is registered.
    ``deleted``: it has been deleted, and is marked as gone if it is.
    """

    key: str
    root: str | None = None
    root_url: str | None = None
    step: int | None = None
    save_id: str | None = None
    tags: frozenset[str] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)
    deleted: bool = False


def register(
    database: Database,
    roots: Roots,
    registration: Registration,
    *,
    actor: str,
    visible: frozenset[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> Registered:
    """Read what is there, and write it to the catalog: `observe`, and a transaction of its own."""
    write = observe(database, roots, registration, actor=actor, visible=visible, clock=clock)
    return database.transact(write)


def observe(
    database: Database,
    roots: Roots,
    registration: Registration,
    *,
    actor: str,
    visible: frozenset[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> Callable[[Connection], Registered]:
    """Read what is there; what is returned writes it to the catalog, in a writing transaction. A large
    structure, which says nothing of a checkpoint by itself, is written here, in many short ones.

    Raises NotFoundError for a root that is not there (or not ``visible``) and where nothing is, ConflictError
    where nothing is committed (the trainer may ask again), UnprocessableError for a key that is not clean,
    UnavailableError where the storage does not answer, and the catalog's errors.
    """
    root, key = resolve(roots, registration, visible)
    observed = clock()  # before the look: what appears while it looks must not count as gone
    facts = look_at(root, key, clock=clock)
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
        facts, step=step, tags=registration.tags, metrics={**facts.metrics, **registration.metrics}
    )


def look_at(root: StorageRoot, key: str, *, clock: Callable[[], float] = time.time) -> CheckpointFacts | None:
    """The facts of the checkpoint ``key`` as it is now; None if there is nothing. Raises a ProblemError."""
    try:
        candidate = _candidate(root, check_key(key))
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


def resolve(
    roots: Roots, registration: Registration, visible: frozenset[str] | None = None
) -> tuple[StorageRoot, str]:
    """The root and the key in it that a registration means. Raises as `register`."""
    if (registration.root is None) == (registration.root_url is None):
        raise UnprocessableError("one of root and root_url is needed", field="root")
    if registration.root is not None:
        if visible is not None and registration.root not in visible:
            raise NotFoundError(f"there is no root {registration.root[:64]!r}")
        return roots.get(registration.root), check_key(registration.key)
    place = _normal(registration.root_url or "")
    best: tuple[StorageRoot, str] | None = None
    for root in roots:
        if visible is not None and root.name not in visible:
            continue
        for own in _places_of(root):
            inner = _below(place, own)
            if inner is not None and (best is None or len(inner) < len(best[1])):
                best = root, inner
    if best is None:
        raise NotFoundError("no root holds that URL; ask the operator to configure one")
    root, inner = best
    return root, check_key(f"{inner}/{registration.key}" if inner else registration.key)


def place_of(roots: Roots, url: str, visible: frozenset[str] | None = None) -> tuple[str, str]:
    """The name of the root that holds the path or URL ``url``, and the key in it. Raises NotFoundError,
    UnprocessableError."""
    folder, _, name = url.rstrip("/").rpartition("/")
    root, key = resolve(roots, Registration(root_url=folder, key=name), visible)
    return root.name, key


def _places_of(root: StorageRoot) -> set[str]:
    if root.path is None:
        return {_normal(root.url)}
    return {str(root.path), os.path.realpath(root.path)}


def _normal(url: str) -> str:
    """A URL as text that can be compared: paths absolute and without links, ``s3a`` as ``s3``."""
    match = _URL.fullmatch(url)
    if match is None:
        return os.path.realpath(url) if Path(url).is_absolute() else ""
    scheme = match[1].lower()
    if scheme == "file":
        try:
            return os.path.realpath(unquote(urlsplit(url).path))
        except ValueError:  # such as file://[, which is nowhere
            return ""
    return f"{'s3' if scheme == 's3a' else scheme}://{match[2].rstrip('/')}"


def _below(place: str, root: str) -> str | None:
    """The part of ``place`` that is below ``root``, "" for the root itself; None if it is elsewhere."""
    root = root.rstrip("/")
    if place == root:
        return ""
    return place[len(root) + 1 :] if place.startswith(f"{root}/") else None
