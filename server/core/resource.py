"""Resources: user-created rows with create, list, read, change and delete, ETags and audit entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from sqlalchemy import Connection, Row, Select, Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from dcp.server.catalog.cursors import decode_cursor, encode_cursor
from dcp.server.catalog.errors import ChangedError, MissingError, StateError
from dcp.server.records.lists import Page

if TYPE_CHECKING:
    from dcp.server.core.ask import Ask
    from dcp.server.core.http.dependencies import PageParams, Precondition

R = TypeVar("R")

Visible = frozenset[str] | None
_Values = Mapping[str, Any]
_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Resource(Generic[R]):
    """Rows of ``table``, which has the columns ``version``, ``created_seconds`` and ``updated_seconds``.

    A column ``name`` is unique. Errors call a row ``what``, audit entries ``noun``. ETags are
    ``"{tag}-{version}"``, where ``tag`` may contain ``{id}``.

    Args:
        record: Makes the answer of a row and its ETag.
        detail: Makes the audited detail.
        query: Selects other columns than those of the table.
        is_visible: Returns True if a key limited to some roots may see a row.
        check: Raises if the caller may see but not change a row.
        root: Names the root whose admins see the audit entries.
        forget: Deletes references to a row.
    """

    table: Table
    what: str
    noun: str
    tag: str
    record: Callable[[Row[Any], str], R]
    detail: Callable[[Row[Any]], _Values] = lambda row: {}
    query: Select[Any] | None = None
    is_visible: Callable[[Row[Any], Visible], bool] = lambda row, visible: True
    check: Callable[[Ask, Row[Any]], object] = lambda ask, row: None
    root: Callable[[Row[Any]], str | None] = lambda row: None
    forget: Callable[[Connection, int], object] = lambda connection, number: None

    # -- rows ------------------------------------------------------------------------------------------------

    @property
    def select(self) -> Select[Any]:
        """Return a query of all rows."""
        return select(self.table) if self.query is None else self.query

    def find(
        self, connection: Connection, number: int, visible: Visible = None, *, locked: bool = False
    ) -> Row[Any]:
        """Return a row. Raises MissingError if no row is visible."""
        query = self.select.where(self.table.c.id == number)
        if locked:
            query = query.with_for_update(of=self.table)
        row = connection.execute(query).one_or_none()
        if row is None or not self.is_visible(row, visible):
            raise MissingError(self.what, number)
        return row

    def rows(self, connection: Connection, /, visible: Visible = None, **values: Any) -> list[Row[Any]]:
        """Return all visible rows with these values, by id. There are few."""
        query = self._with(values).order_by(self.table.c.id)
        return [row for row in connection.execute(query) if self.is_visible(row, visible)]

    def _rows_after(
        self, connection: Connection, after: int, visible: Visible, values: _Values
    ) -> Iterator[Row[Any]]:
        """Yield the rows after the id ``after`` like `rows`, reading only consumed rows."""
        query = self._with(values).order_by(self.table.c.id).limit(_CHUNK)
        while rows := connection.execute(query.where(self.table.c.id > after)).all():
            yield from (row for row in rows if self.is_visible(row, visible))
            after = rows[-1].id

    def has(self, connection: Connection, **values: Any) -> bool:
        """Return True if a row has these values."""
        return connection.execute(self._with(values).limit(1)).first() is not None

    def _with(self, values: _Values) -> Select[Any]:
        return self.select.where(*(self.table.c[name] == value for name, value in values.items()))

    def insert(
        self, connection: Connection, ask: Ask, values: _Values, detail: _Values | None = None
    ) -> Row[Any]:
        """Add a row. Raises StateError if the name exists."""
        now = ask.now
        statement = insert(self.table).values(**values, created_seconds=now, updated_seconds=now)
        self._check_name(connection, values, None)
        try:
            number = connection.execute(statement.returning(self.table.c.id)).scalar_one()
        except IntegrityError as error:
            self._refuse_name(values, error)
        row = self.find(connection, number)
        self.audit(connection, ask, "create", row, detail)
        return row

    def lock(self, connection: Connection, ask: Ask, number: int, match: Precondition) -> Row[Any]:
        """Return a row for a change. Raises MissingError, and ChangedError if ``match`` differs."""
        expected = match.version(self.tag.format(id=number))
        row = self.find(connection, number, ask.visible, locked=True)
        self.check(ask, row)
        if expected is not None and row.version != expected:
            raise ChangedError(self.what, number, expected=expected, version=row.version)
        return row

    def update(
        self,
        connection: Connection,
        ask: Ask,
        row: Row[Any],
        values: _Values,
        action: str = "change",
        detail: _Values | None = None,
    ) -> Row[Any]:
        """Change a locked row. Raises StateError if the new name exists."""
        self._check_name(connection, values, row.id)
        statement = update(self.table).where(self.table.c.id == row.id)
        new = {**values, "version": row.version + 1, "updated_seconds": ask.now}
        try:
            connection.execute(statement.values(**new))
        except IntegrityError as error:
            self._refuse_name(values, error)
        found = self.find(connection, row.id)
        self.audit(connection, ask, action, found, detail)
        return found

    def remove(self, connection: Connection, ask: Ask, row: Row[Any]) -> None:
        """Delete a locked row and references to it."""
        self.forget(connection, row.id)
        connection.execute(delete(self.table).where(self.table.c.id == row.id))
        self.audit(connection, ask, "delete", row)

    def _check_name(self, connection: Connection, values: _Values, own: int | None) -> None:
        if "name" in values:
            query = select(self.table.c.id).where(self.table.c.name == values["name"])
            if connection.execute(query).scalar() not in (None, own):
                self._refuse_name(values)

    def _refuse_name(self, values: _Values, error: Exception | None = None) -> NoReturn:
        raise StateError(f"{self.what} {values.get('name')!r} already exists", state="exists") from error

    def audit(
        self, connection: Connection, ask: Ask, action: str, row: Row[Any], detail: _Values | None = None
    ) -> None:
        """Write an audit entry."""
        shown = self.detail(row) if detail is None else detail
        about = f"{self.noun}.{action}", f"{self.noun}:{row.id}", shown
        ask.change().record(connection, *about, root=self.root(row))

    # -- requests --------------------------------------------------------------------------------------------

    def answer(self, ask: Ask, row: Row[Any], *, is_new: bool = False) -> R:
        """Return the record of a row, and set the headers of the response."""
        if is_new:
            ask.response.headers["Location"] = f"{ask.request.url.path}/{row.id}"
        ask.response.headers["ETag"] = self._etag(row)
        return self.shown(row)

    def shown(self, row: Row[Any]) -> R:
        """Return the record of a row."""
        return self.record(row, self._etag(row))

    def create(self, ask: Ask, values: _Values) -> R:
        """Answer a POST with `insert`."""
        return ask.transact(
            lambda connection: self.answer(ask, self.insert(connection, ask, values), is_new=True)
        )

    def page(
        self,
        ask: Ask,
        page: PageParams,
        matches: Callable[[Row[Any]], bool] = lambda row: True,
        **values: Any,
    ) -> Page[R]:
        """Answer the GET of the list by id, filtered by these values."""
        after = 0 if page.cursor is None else decode_cursor(page.cursor, self.noun, int)[0]
        with ask.reading() as connection:
            found = (row for row in self._rows_after(connection, after, ask.visible, values) if matches(row))
            left = list(islice(found, page.limit + 1))
        shown = left[: page.limit]
        cursor = encode_cursor(self.noun, shown[-1].id) if len(left) > len(shown) else None
        return Page(tuple(map(self.shown, shown)), cursor)

    def read(self, ask: Ask, number: int) -> R:
        """Answer the GET of one row."""
        return self.answer(ask, ask.find(self.find, number, ask.visible))

    def change(self, ask: Ask, number: int, match: Precondition, values: _Values) -> R:
        """Answer a PATCH with `lock` and `update`."""

        def act(connection: Connection) -> Row[Any]:
            return self.update(connection, ask, self.lock(connection, ask, number, match), values)

        return self.answer(ask, ask.transact(act))

    def delete(self, ask: Ask, number: int, match: Precondition) -> None:
        """Answer a DELETE."""

        def act(connection: Connection) -> None:
            self.remove(connection, ask, self.lock(connection, ask, number, match))

        ask.transact(act)

    def _etag(self, row: Row[Any]) -> str:
        return f'"{self.tag.format(id=row.id)}-{row.version}"'
