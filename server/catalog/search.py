"""Incremental search: names that contain the text in any case, best matches first.

Runs, checkpoint names, aliases and tags are few enough to test all. Tensors are searched through their name
patterns (`dcp.server.catalog.structures`): a few hundred per million names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, Text, case, cast, func, literal, or_, select

from dcp.server.catalog.names import check_text, contains, fold, pattern_of
from dcp.server.database.tables import (
    aliases,
    checkpoint_names,
    checkpoints,
    roots,
    runs,
    structure_patterns,
    structure_tensors,
    structures,
    tags,
    tensor_patterns,
)
from dcp.server.records.declaring import OneOf, Shown

HitKind = Literal["run", "checkpoint", "alias", "tag", "tensor", "note"]
"""Kinds of hits; the notes feature finds notes."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A match. ``rank``: 0 equal, 1 prefix, 2 start of a word, 3 elsewhere.

    ``checkpoint_id`` is the matching checkpoint, or the newest with the tensor. ``count``: checkpoints with
    the tag, or tensors of one structure whose names differ only by numbers.
    """

    kind: Annotated[str, OneOf(HitKind), Shown("Plug-ins may find further kinds.")]
    text: Annotated[str, Shown("The matching name.")]
    rank: Annotated[int, Shown("0: equal; 1: prefix; 2: start of a word; 3: elsewhere.")]
    root: str | None = None
    run: Annotated[str | None, Shown("Key of the run.")] = None
    run_id: int | None = None
    checkpoint_id: Annotated[int | None, Shown("The matching checkpoint, or the newest with the tensor.")] = (
        None
    )
    key: Annotated[str | None, Shown("Key of the checkpoint.")] = None
    step: int | None = None
    count: Annotated[
        int, Shown("Checkpoints with the tag, or tensors whose names differ only by numbers.")
    ] = 1
    href: Annotated[str | None, Shown("The page of the object.", may_be_absent=True)] = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best hits of each kind, best first."""

    items: tuple[SearchHit, ...]


_BEGIN_WORDS: Final = ("/", ".", "_", "-", " ")
_NAMES: Final = 50
"""Maximum matching checkpoint names and tensor patterns that become hits."""
_ROWS: Final = 2_000
"""Maximum checkpoints of these names that are sorted."""
_TAGS: Final = 5_000
_COUNTED: Final = 1_000
_TENSORS: Final = 100_000
"""Maximum names tested for a searched number."""
_MAX_STEP: Final = (1 << 63) - 1
_BY_NAME: Final = "INDEXED BY ix_checkpoints_name_id"
_BY_STRUCTURE: Final = "INDEXED BY ix_checkpoints_structure_id_id"
"""Index hints for SQLite, which would otherwise read a whole root."""
_LAST: Final = "\U0010ffff"


def search(
    connection: Connection,
    text: str,
    visible: frozenset[str] | None = None,
    *,
    kinds: Collection[str] = (),
    limit: int = 10,
) -> SearchResult:
    """Return visible objects with ``text`` in their names, or as their step or path.

    Returns up to ``limit`` hits of each of ``kinds`` (default: all). Ignores kinds found by features. Raises
    `InvalidQueryError` for invalid text.
    """
    typed = check_text("q", text.strip())
    one = _SearchRequest(connection, typed, fold(typed), _visible_ids(connection, visible), limit)
    found = [hit for kind, find in _FINDERS.items() if not kinds or kind in kinds for hit in find(one)]
    order: list[str] = list(_FINDERS)
    return SearchResult(tuple(sorted(found, key=lambda hit: (hit.rank, order.index(hit.kind)))))


def _visible_ids(connection: Connection, visible: frozenset[str] | None) -> list[int] | None:
    if visible is None:
        return None
    query = select(roots.c.id).where(roots.c.name.in_(sorted(visible)))
    return list(connection.execute(query).scalars())


@dataclass(frozen=True, slots=True)
class _SearchRequest:
    connection: Connection
    typed: str
    text: str  # lower case
    root_ids: list[int] | None
    limit: int

    def has(self, column: ColumnElement[Any], text: str | None = None) -> ColumnElement[bool]:
        return contains(self.connection, self.folded(column), self.text if text is None else text)

    def folded(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        is_sqlite = self.connection.dialect.name == "sqlite"
        # Independent of the locale of the server, for equal results.
        return func.lower(column if is_sqlite else cast(column, Text).collate("C"))

    def rank(self, column: ColumnElement[Any], text: str | None = None) -> ColumnElement[Any]:
        """Return the `SearchHit.rank` of a column that contains the text."""
        wanted = self.text if text is None else text
        name = self.folded(column)
        begins = [self.has(column, f"{mark}{wanted}") for mark in _BEGIN_WORDS]
        return case(
            (name == wanted, 0),
            (func.substr(name, 1, len(wanted)) == wanted, 1),
            (or_(*begins), 2),
            else_=3,
        )

    def seen(self, root_id: ColumnElement[Any]) -> ColumnElement[bool]:
        return literal(True) if self.root_ids is None else root_id.in_(self.root_ids)

    def rows(self, query: Select[Any]) -> Iterator[Any]:
        return iter(self.connection.execute(query.limit(self.limit)))


# -- runs, and names that people give ------------------------------------------------------------------------


def _runs(one: _SearchRequest) -> Iterator[SearchHit]:
    rank = one.rank(runs.c.key).label("rank")
    query = (
        select(runs.c.id, runs.c.key, roots.c.name.label("root"), runs.c.checkpoint_count, rank)
        .join(roots, roots.c.id == runs.c.root_id)
        .where(one.has(runs.c.key), one.seen(runs.c.root_id))
        .order_by(rank, runs.c.latest_order.desc(), runs.c.id.desc())
    )
    for row in one.rows(query):
        yield SearchHit("run", row.key, row.rank, row.root, row.key, row.id, count=row.checkpoint_count)


def _aliases(one: _SearchRequest) -> Iterator[SearchHit]:
    rank = one.rank(aliases.c.name).label("rank")
    query = (
        _select_checkpoints(aliases.c.name.label("text"), rank)
        .join(aliases, aliases.c.checkpoint_id == checkpoints.c.id)
        .where(one.has(aliases.c.name), one.seen(checkpoints.c.root_id))
        .order_by(rank, aliases.c.updated_seconds.desc(), checkpoints.c.id.desc())
    )
    return (_hit("alias", row, row.text) for row in one.rows(query))


def _tags(one: _SearchRequest) -> Iterator[SearchHit]:
    known = _distinct_tags()
    name = known.c.tag
    rank = one.rank(name).label("rank")
    mine = (
        select(tags.c.checkpoint_id)
        .join(checkpoints, checkpoints.c.id == tags.c.checkpoint_id)
        .where(tags.c.tag == name, one.seen(checkpoints.c.root_id))
    )
    query = select(name, rank).where(name.is_not(None), one.has(name), mine.exists())
    for row in list(one.rows(query.order_by(rank, name))):
        counted = (
            select(tags.c.checkpoint_id)
            .join(checkpoints, checkpoints.c.id == tags.c.checkpoint_id)
            .where(tags.c.tag == row.tag, one.seen(checkpoints.c.root_id))
            .limit(_COUNTED)
        )
        count = one.connection.execute(select(func.count()).select_from(counted.subquery())).scalar_one()
        yield SearchHit("tag", row.tag, row.rank, count=count)


def _distinct_tags() -> Any:
    """Return the tags with one index step per tag, since each tag has many rows."""
    known = select(func.min(tags.c.tag).label("tag")).cte("known", recursive=True)
    following = select(func.min(tags.c.tag)).where(tags.c.tag > known.c.tag).scalar_subquery()
    step = select(following).where(known.c.tag.is_not(None))
    return select(known.union_all(step).c.tag).limit(_TAGS).subquery()


# -- checkpoints ---------------------------------------------------------------------------------------------


def _checkpoints(one: _SearchRequest) -> Iterator[SearchHit]:
    """Find by step, by name, and by the end of the run key and the name joined with a slash."""
    found: dict[int, SearchHit] = {}
    folder, slash, name = one.text.rpartition("/")
    for hits in (_of_step(one), _of_path(one, folder, name) if slash else _of_name(one)):
        for hit in hits:
            found.setdefault(hit.checkpoint_id or 0, hit)
    return iter(sorted(found.values(), key=lambda hit: hit.rank)[: one.limit])


def _of_step(one: _SearchRequest) -> Iterator[SearchHit]:
    if not one.text.isdecimal() or not one.text.isascii() or int(one.text[:20]) > _MAX_STEP:
        return iter(())
    query = _select_checkpoints().where(
        checkpoints.c.step_order == int(one.text), one.seen(checkpoints.c.root_id)
    )
    rows = one.rows(query.order_by(checkpoints.c.id.desc()))
    return (_hit("checkpoint", row, row.key, 0) for row in rows)


def _of_name(one: _SearchRequest) -> Iterator[SearchHit]:
    name = checkpoint_names.c.name
    rank = one.rank(name).label("rank")
    names = select(name, rank).where(one.has(name)).order_by(rank, func.length(name), name.desc())
    if one.root_ids is not None:
        mine = select(checkpoints.c.id).where(checkpoints.c.name == name, one.seen(checkpoints.c.root_id))
        names = names.where(mine.with_hint(checkpoints, _BY_NAME, "sqlite").exists())
    ranks = {row.name: row.rank for row in one.connection.execute(names.limit(_NAMES))}
    some = (
        select(checkpoints.c.id)
        .where(checkpoints.c.name.in_(list(ranks)), one.seen(checkpoints.c.root_id))
        .with_hint(checkpoints, _BY_NAME, "sqlite")
        .limit(_ROWS)
    )
    query = _select_checkpoints().where(checkpoints.c.id.in_(some))
    by_rank = case(ranks, value=checkpoints.c.name) if ranks else literal(3)
    rows = one.rows(query.order_by(by_rank, checkpoints.c.committed_seconds.desc(), checkpoints.c.id.desc()))
    return (_hit("checkpoint", row, row.key, ranks[row.name]) for row in rows)


def _of_path(one: _SearchRequest, folder: str, name: str) -> Iterator[SearchHit]:
    """Find below the newest runs whose keys end with the text."""
    key = one.folded(runs.c.key)
    is_it = or_(key == folder, func.substr(key, func.length(key) - len(folder)) == f"/{folder}")
    newest = select(runs.c.id).where(is_it, one.seen(runs.c.root_id)).order_by(runs.c.latest_order.desc())
    numbers = list(one.connection.execute(newest.limit(_NAMES)).scalars())
    rank = one.rank(checkpoints.c.name, name).label("rank")
    query = _select_checkpoints(rank).where(
        checkpoints.c.run_id.in_(numbers), one.has(checkpoints.c.name, name)
    )
    rows = one.rows(query.order_by(rank, checkpoints.c.step_order.desc(), checkpoints.c.id.desc()))
    return (_hit("checkpoint", row, row.key) for row in rows)


def _select_checkpoints(*columns: ColumnElement[Any]) -> Select[Any]:
    """Select existing and restorable checkpoints."""
    own = (checkpoints.c.id, checkpoints.c.key, checkpoints.c.name, checkpoints.c.step, checkpoints.c.run_id)
    query = select(*own, roots.c.name.label("root"), runs.c.key.label("run"), *columns)
    query = query.join_from(checkpoints, roots, roots.c.id == checkpoints.c.root_id)
    query = query.join(runs, runs.c.id == checkpoints.c.run_id)
    return query.where(checkpoints.c.state.not_in(("vanished", "purged")))


def _hit(kind: HitKind, row: Any, text: str, rank: int | None = None) -> SearchHit:
    found = row.rank if rank is None else rank
    return SearchHit(kind, text, found, row.root, row.run, row.run_id, row.id, row.key, row.step)


# -- tensors -------------------------------------------------------------------------------------------------


class _TensorPlace(NamedTuple):
    structure_id: int
    name: str
    alike: int


def _tensors(one: _SearchRequest) -> Iterator[SearchHit]:
    """Find one tensor for all tensors whose names differ only by numbers."""
    pattern, text = tensor_patterns.c.pattern, pattern_of(one.text)
    query = select(pattern).where(contains(one.connection, pattern, text))
    if one.root_ids is not None:
        query = query.where(_structures(one, pattern).exists())
    order = (one.rank(pattern, text), func.length(pattern), pattern)
    found = one.connection.execute(query.order_by(*order).limit(_NAMES)).scalars().all()
    find = partial(_first, one) if text == one.text else _Numbered(one).find
    hits = (_tensor(one, place) for place in map(find, found) if place is not None)
    return islice((hit for hit in hits if hit is not None), one.limit)


def _tensor(one: _SearchRequest, place: _TensorPlace) -> SearchHit | None:
    query = _select_checkpoints().where(
        checkpoints.c.structure_id == place.structure_id, one.seen(checkpoints.c.root_id)
    )
    query = query.with_hint(checkpoints, _BY_STRUCTURE, "sqlite").order_by(checkpoints.c.id.desc())
    row = one.connection.execute(query.limit(1)).one_or_none()
    if row is None:
        return None
    return replace(_hit("tensor", row, place.name, _rank_of(fold(place.name), one.text)), count=place.alike)


def _structures(one: _SearchRequest, pattern: ColumnElement[Any]) -> Select[Any]:
    """Return structures with the pattern of visible checkpoints, newest first."""
    own = structure_patterns.c
    query = select(own.structure_id, own.position, own.tensor_count)
    query = query.where(own.pattern == pattern, _is_seen(one, own.structure_id).exists())
    return query.order_by(own.structure_id.desc())


def _is_seen(one: _SearchRequest, structure_id: ColumnElement[Any]) -> Select[Any]:
    query = select(checkpoints.c.id).where(
        checkpoints.c.structure_id == structure_id,
        checkpoints.c.state.not_in(("vanished", "purged")),
        one.seen(checkpoints.c.root_id),
    )
    return query.with_hint(checkpoints, _BY_STRUCTURE, "sqlite")


def _first(one: _SearchRequest, pattern: str) -> _TensorPlace | None:
    """Return the first tensor of the pattern, in the newest structure with the pattern."""
    row = one.connection.execute(_structures(one, literal(pattern)).limit(1)).one_or_none()
    if row is None:
        return None
    names = structure_tensors.c
    query = select(names.fqn).where(names.structure_id == row.structure_id, names.position == row.position)
    return _TensorPlace(row.structure_id, one.connection.execute(query).scalar_one(), row.tensor_count)


class _Numbered:
    """Search of tensors by text with numbers: prefixes by index, else structures from the newest."""

    def __init__(self, one: _SearchRequest) -> None:
        self._one = one
        self._known: dict[int, Mapping[str, str]] = {}
        self._left = _TENSORS
        names = structure_tensors.c
        query = select(names.structure_id, names.fqn).where(
            names.fqn >= one.typed,
            names.fqn < f"{one.typed}{_LAST}",
            _is_seen(one, names.structure_id).exists(),
        )
        rows = one.connection.execute(query.order_by(names.fqn, names.structure_id.desc()).limit(_ROWS))
        self._begin: dict[str, tuple[int, str]] = {}
        for number, fqn in rows:
            self._begin.setdefault(pattern_of(fqn), (number, fqn))

    def find(self, pattern: str) -> _TensorPlace | None:
        """Return the first tensor of the pattern; None if no name contains the text."""
        query = _structures(self._one, literal(pattern))
        begin = self._begin.get(pattern)
        if begin is not None:
            query = query.where(structure_patterns.c.structure_id == begin[0])
            row = self._one.connection.execute(query).one_or_none()
            return _TensorPlace(*begin, 1 if row is None else row.tensor_count)
        for row in self._one.connection.execute(query.limit(_NAMES)).all():
            name = self._of(row.structure_id).get(pattern)
            if name is not None:
                return _TensorPlace(row.structure_id, name, row.tensor_count)
        return None

    def _of(self, number: int) -> Mapping[str, str]:
        if number not in self._known:
            self._known[number] = self._look(number)
        return self._known[number]

    def _look(self, number: int) -> dict[str, str]:
        size = select(structures.c.tensor_count + structures.c.object_count).where(structures.c.id == number)
        self._left -= self._one.connection.execute(size).scalar_one()
        if self._left < 0 and self._known:
            return {}
        name = structure_tensors.c.fqn
        query = select(name).where(structure_tensors.c.structure_id == number, self._one.has(name))
        rows = self._one.connection.execute(query.order_by(structure_tensors.c.position).limit(_ROWS))
        found: dict[str, str] = {}
        for fqn in rows.scalars():
            found.setdefault(pattern_of(fqn), fqn)
        return found


def _rank_of(name: str, text: str) -> int:
    if name == text:
        return 0
    if name.startswith(text):
        return 1
    return 2 if any(f"{mark}{text}" in name for mark in _BEGIN_WORDS) else 3


_FINDERS: Final[Mapping[HitKind, Callable[[_SearchRequest], Iterator[SearchHit]]]] = {
    "run": _runs,
    "checkpoint": _checkpoints,
    "alias": _aliases,
    "tag": _tags,
    "tensor": _tensors,
}
"""Finders in the display order of hits with equal rank."""
