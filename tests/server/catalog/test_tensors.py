"""Tensors of a structure: pages, globs, and the tree of their names, on both databases."""

from __future__ import annotations

import pytest

from dcp.server.catalog.contents.layers import in_order
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.contents.tensors import tensors_page, tree_level
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.database.engine import Database
from tests.support.structures import ensure_structure

pytestmark = pytest.mark.each_database  # their SQL differs

NAMES = [f"layers.{n}.{part}" for n in range(12) for part in ("w", "b")] + ["layers", "a.b", "a.b-x", "a.b.c"]


@pytest.fixture
def structure(database: Database) -> int:
    """A structure of `NAMES` with two values."""
    facts = [
        StructureTensor(name, "tensor", "float32" if name != "a.b" else "int8", (2, 3), 24) for name in NAMES
    ]
    facts += [
        StructureTensor("step", "object", None, None, 0),
        StructureTensor("ä.ö", "object", None, None, 0),
    ]
    with database.write() as connection:
        return ensure_structure(connection, StructureFacts.of(facts))


def test_pages_have_all_in_order(database: Database, structure: int) -> None:
    """Following cursors gives each entry once, by name, numbers as people count."""
    found, cursor = [], None
    with database.read() as connection:
        while True:
            page = tensors_page(connection, structure, limit=7, cursor=cursor)
            found += [entry.fqn for entry in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
    assert found == ["a.b", "a.b-x", "a.b.c", "layers", *sorted(NAMES[:24], key=in_order), "step", "ä.ö"]
    assert found.index("layers.2.b") < found.index("layers.10.b")


def test_filters(database: Database, structure: int) -> None:
    """By glob, kind and dtype; a cursor of another query is refused."""
    with database.read() as connection:
        page = tensors_page(connection, structure, limit=3, glob="layers.*.w")
        assert [entry.fqn for entry in page.items] == ["layers.0.w", "layers.1.w", "layers.2.w"]
        assert (page.items[0].dtype, page.items[0].shape, page.items[0].bytes) == ("float32", (2, 3), 24)
        objects = tensors_page(connection, structure, limit=50, kind="object")
        assert [(entry.fqn, entry.shape) for entry in objects.items] == [("step", None), ("ä.ö", None)]
        narrow = tensors_page(connection, structure, limit=50, dtype="int8")
        assert [entry.fqn for entry in narrow.items] == ["a.b"]
        assert tensors_page(connection, structure + 99, limit=5).items == ()
        with pytest.raises(InvalidQueryError):
            tensors_page(connection, structure, limit=3, cursor=page.next_cursor)
        with pytest.raises(InvalidQueryError):
            tensors_page(connection, structure, limit=3, glob="*" * 300)


def test_the_tree(database: Database, structure: int) -> None:
    """Each level has the sums of what is below; a name may be a tensor and a module at once."""
    with database.read() as connection:
        top = tree_level(connection, structure, "", limit=50).items
        assert [(node.name, node.tensors, node.objects, node.bytes) for node in top] == [
            ("a", 3, 0, 72),
            ("layers", 25, 0, 600),
            ("step", 0, 1, 0),
            ("ä", 0, 1, 0),
        ]
        assert top[0].entry is None
        assert top[1].entry is not None
        below = tree_level(connection, structure, "a", limit=50).items
        assert [(node.name, node.tensors, node.entry is not None) for node in below] == [
            ("b", 2, True),
            ("b-x", 1, True),
        ]
        first = tree_level(connection, structure, "layers", limit=10)
        second = tree_level(connection, structure, "layers", limit=10, cursor=first.next_cursor)
        names = [node.name for node in (*first.items, *second.items)]
        assert names == [str(n) for n in range(12)]
        assert second.next_cursor is None
        assert tree_level(connection, structure, "nothing", limit=5).items == ()
        with pytest.raises(InvalidQueryError):
            tree_level(connection, structure, "a", limit=10, cursor=first.next_cursor)


def test_characters_that_mean_something_elsewhere(database: Database) -> None:
    """Names are compared as they are."""
    names = ["50%_a.x", "50xya.x", "[a].x", "Z.x", "a\\b.x"]
    facts = StructureFacts.of(StructureTensor(name, "tensor", "int8", (1,), 1) for name in names)
    with database.write() as connection:
        number = ensure_structure(connection, facts)
    with database.read() as connection:
        assert [node.name for node in tree_level(connection, number, "", limit=9).items] == sorted(
            name[:-2] for name in names
        )
        assert [node.name for node in tree_level(connection, number, "50%_a", limit=9).items] == ["x"]
