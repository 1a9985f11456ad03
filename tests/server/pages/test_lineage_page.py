"""What was made of what, as a graph with its table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from dcp.server.catalog.checkpoints import upsert_checkpoints
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.labelling.lineage import add_lineage
from dcp.server.pages.drawings.graphs import BOX_HEIGHT, BOX_WIDTH, NodeBox, graph_of
from dcp.server.records.declaring import moment
from dcp.server.records.labels import LineageEdge, LineageNode
from tests.support.app import App, running_app
from tests.support.catalog_rows import T0, add_checkpoint
from tests.support.pages import Browser, PageText

HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "\u202egnp.exe \u2067\u05d0\u05d1",
    "\U0001f4a5\U0001f469\u200d\U0001f680",
    "{{ 7*7 }}",
    "z" * 900,
)


@pytest.fixture
def app(tmp_path: Path, _sqlite_template: Path) -> Iterator[App]:
    """With keys."""
    shutil.copy(_sqlite_template, tmp_path / "catalog.sqlite")
    with running_app(
        f"sqlite:///{tmp_path / 'catalog.sqlite'}", tmp_path, rate_limit="100000/minute"
    ) as made:
        yield made


def node(number: int, distance: int) -> LineageNode:
    """One of a graph."""
    return LineageNode(number, "main", f"run/{number}", number, "dcp", "committed", distance)


def edge(child: int, parent: int) -> LineageEdge:
    """One of a graph."""
    return LineageEdge(child, parent, "converted_from", None, moment(T0))


def is_apart(one: NodeBox, other: NodeBox) -> bool:
    """Whether neither lies on the other."""
    return abs(one.x - other.x) >= BOX_WIDTH or abs(one.y - other.y) >= BOX_HEIGHT


def test_a_graph_is_laid_out_in_columns() -> None:
    """By distance from left to right; no box lies on another; lines go from right edges to left ones."""
    nodes = [node(1, 0), node(2, -1), node(3, 1), node(4, 1), node(5, 2)]
    graph = graph_of(nodes, [edge(1, 2), edge(3, 1), edge(4, 1), edge(5, 4)])
    places = {box.node.id: box for box in graph.boxes}
    assert places[2].x < places[1].x < places[3].x == places[4].x < places[5].x
    assert all(is_apart(a, b) for a in graph.boxes for b in graph.boxes if a is not b)
    assert (graph.left_out, len(graph.lines)) == (0, 4)
    for line in graph.lines:
        start, end = places[line.edge.parent_id], places[line.edge.child_id]
        assert line.path.startswith(f"M{start.x + BOX_WIDTH} ")
        assert line.path.endswith(f" {end.x} {end.y + BOX_HEIGHT // 2}")
    assert all(0 <= box.y <= graph.height - BOX_HEIGHT for box in graph.boxes)
    assert max(box.x for box in graph.boxes) == graph.width - BOX_WIDTH


def test_children_are_as_high_as_their_parents() -> None:
    """So that lines do not cross."""
    nodes = [node(1, 0), node(2, 1), node(3, 1), node(12, 2), node(13, 2)]
    graph = graph_of(nodes, [edge(2, 1), edge(3, 1), edge(13, 2), edge(12, 3)])
    places = {box.node.id: box.y for box in graph.boxes}
    assert places[2] < places[3] and places[13] < places[12]


def test_what_is_too_much_is_left_out_of_the_graph() -> None:
    """A column has an end, and so has the distance; lines to what is not drawn are not drawn, either."""
    nodes = [node(0, 0), *(node(n, 1) for n in range(1, 101)), *(node(100 + n, -n) for n in range(1, 21))]
    edges = [
        *(edge(n, 0) for n in range(1, 101)),
        *(edge(100 + n, 101 + n) for n in range(1, 20)),
        edge(0, 101),
    ]
    graph = graph_of(nodes, edges)
    assert len(graph.boxes) == 1 + 12 + 6
    assert graph.left_out == 121 - 19
    assert len(graph.lines) == 12 + 6


def test_a_family_is_shown(app: App) -> None:
    """Ancestors, the one asked for, descendants, each with its link; in which way, by which job, and when."""
    base, mine, export, hidden = (
        add_checkpoint(app.service.database, key, root=root, resumed_from=resumed_from)
        for key, root, resumed_from in (
            ("base/step-1", "main", None),
            ("run/step-2", "main", "save-base/step-1"),
            ("exports/model", "main", None),
            ("secret/step-2", "other", None),
        )
    )

    def act(connection: Connection) -> None:
        add_lineage(connection, export, mine, map=f"there{HOSTILE[1]}")
        add_lineage(connection, hidden, mine)

    app.service.database.transact(act)
    browser = Browser(app.client())
    browser.sign_in(app.key("read", roots=["main"]))
    path = f"/checkpoints/{mine}/lineage"
    own = browser.page(f"/checkpoints/{mine}")
    assert path in own.links
    origins, _, made = own.text.partition("Where it comes from")[2].partition("What became of it")
    assert "base/step-1" in origins and "exports/model" not in origins and "exports/model" in made
    page = browser.page(path)
    assert {f"/checkpoints/{one}/lineage" for one in (base, export)} <= set(page.links)
    assert "resumed from step-1" in page.text and "converted from step-2" in page.text
    assert f"through the map there{HOSTILE[1]}" in page.text
    assert "secret" not in page.text and "other" not in page.text
    assert sum(name == "foreignobject" for name, _ in page.elements) == 3
    (twin,) = [given["href"] for _, given in page.elements if given.get("class") == "twin"]
    assert len(browser.get(twin).json()["nodes"]) == 3
    alone = browser.page(f"/checkpoints/{base}/lineage")
    assert "base/step-1" in alone.text
    assert browser.get(f"/checkpoints/{hidden}/lineage").status_code == 404
    assert browser.get("/checkpoints/99/lineage").status_code == 404


def test_nothing_is_known(app: App) -> None:
    """Which is said, with what would be noted."""
    number = add_checkpoint(app.service.database, "run/step-1")
    browser = Browser(app.client())
    browser.sign_in(app.key("read"))
    assert "Nothing was made of it" in browser.page(f"/checkpoints/{number}/lineage").text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_any_kind_in_the_graph(app: App, name: str) -> None:
    """Of runs and checkpoints: text, cut where it is long."""
    name = name.replace("/", "|")[:400]
    one = add_checkpoint(app.service.database, f"{name}/{name}1", step=1)
    two = add_checkpoint(app.service.database, f"{name}/{name}2", step=2)
    app.service.database.transact(lambda connection: add_lineage(connection, two, one))
    browser = Browser(app.client())
    browser.sign_in(app.key("read"))
    page = browser.page(f"/checkpoints/{one}/lineage")
    assert name[:60] in PageText(browser.get(f"/checkpoints/{one}/lineage").text).text or " " in name
    assert not [given for tag, given in page.elements if tag == "img"]


def test_a_huge_family_is_a_small_page(app: App) -> None:
    """Five hundred in the table, a dozen drawn, and how many are not."""
    base = add_checkpoint(app.service.database, "r/base", step=None)

    def act(connection: Connection) -> None:
        facts = [
            CheckpointFacts(root="main", key=f"r/{'n' * 400}{n}", format="dcp", observed_seconds=1.0)
            for n in range(600)
        ]
        for child in upsert_checkpoints(connection, facts):
            add_lineage(connection, child.id, base)

    app.service.database.transact(act)
    browser = Browser(app.client())
    browser.sign_in(app.key("read"))
    page = browser.page(f"/checkpoints/{base}/lineage")
    assert "There are more than 500" in page.text and "487 more are in the table alone" in page.text
    assert len(browser.get(f"/checkpoints/{base}/lineage").content) < 1_500_000


def test_the_page_of_a_checkpoint_says_where_else_its_tensors_are(app: App) -> None:
    """With links and hostile names as text, of what the key may see; nothing where nobody else has them."""
    database = app.service.database
    one = add_checkpoint(database, "run/step-1", content_digest="d" * 32)
    names = [name.replace("/", "|") for name in HOSTILE[:2]]
    same = [add_checkpoint(database, f"copies/{name}", content_digest="d" * 32) for name in names]
    hidden = add_checkpoint(database, "secret/step-1", root="other", content_digest="d" * 32)
    alone = add_checkpoint(database, "run/step-2", content_digest="e" * 32)
    browser = Browser(app.client())
    browser.sign_in(app.key("read", roots=["main"]))
    page = browser.page(f"/checkpoints/{one}")
    assert "The same tensors, also in" in page.text and names[0] in page.text
    assert {f"/checkpoints/{number}" for number in same} <= set(page.links)
    assert f"/checkpoints/{hidden}" not in page.links
    assert "also in" not in browser.page(f"/checkpoints/{alone}").text
    answer = app.client("read").get(f"/api/v1/checkpoints/{one}/lineage").json()
    assert [node["id"] for node in answer["also_in"]] == [hidden, *reversed(same)]
