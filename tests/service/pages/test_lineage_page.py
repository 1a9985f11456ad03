"""Lineage as a graph and a table."""

from __future__ import annotations

from tests.support.app import App
from tests.support.catalog_rows import add_checkpoint
from tests.support.page_rows import add_steps, derive
from tests.support.pages import HOSTILE, Browser


def test_ancestors_and_descendants_are_shown(keyed: App, of_main: Browser) -> None:
    """Ancestors and descendants are shown with links, relation, job and map."""
    base, mine, export, hidden = (
        add_checkpoint(keyed.service.database, key, root=root, resumed_from=resumed_from)
        for key, root, resumed_from in (
            ("base/step-1", "main", None),
            ("run/step-2", "main", "save-base/step-1"),
            ("exports/model", "main", None),
            ("secret/step-2", "other", None),
        )
    )

    derive(keyed, export, mine, map=f"there{HOSTILE[1]}")
    derive(keyed, hidden, mine)
    path = f"/checkpoints/{mine}/lineage"
    own = of_main.page(f"/checkpoints/{mine}")
    assert path in own.links
    origins, _, made = own.text.partition("Where it comes from")[2].partition("Made from it")
    assert "base/step-1" in origins and "exports/model" not in origins and "exports/model" in made
    page = of_main.page(path)
    assert {f"/checkpoints/{one}/lineage" for one in (base, export)} <= set(page.links)
    assert "resumed from step-1" in page.text and "converted from step-2" in page.text
    assert f"through the map there{HOSTILE[1]}" in page.text
    assert "secret" not in page.text and "other" not in page.text
    assert sum(name == "foreignobject" for name, _ in page.elements) == 3
    (twin,) = [given["href"] for _, given in page.elements if given.get("class") == "twin"]
    assert len(of_main.get(twin).json()["nodes"]) == 3
    alone = of_main.page(f"/checkpoints/{base}/lineage")
    assert "base/step-1" in alone.text
    assert of_main.get(f"/checkpoints/{hidden}/lineage").status_code == 404
    assert of_main.get("/checkpoints/99/lineage").status_code == 404


def test_the_page_of_a_large_family_is_small(keyed: App, reader: Browser) -> None:
    """A large family has 500 rows in the table and a dozen boxes; the page says how many are left out."""
    base = add_checkpoint(keyed.service.database, "r/base", step=None)

    for child in add_steps(keyed, f"r/{'n' * 400}", range(1, 601)):
        derive(keyed, child, base)
    page = reader.page(f"/checkpoints/{base}/lineage")
    assert (
        "More than 500 checkpoints are related" in page.text
        and "487 more are in the table alone" in page.text
    )
    assert len(reader.get(f"/checkpoints/{base}/lineage").content) < 1_500_000
    boxes = {(given["x"], given["y"]) for name, given in page.elements if name == "foreignobject"}
    assert len(boxes) == 13, "none lies on another"


def test_pages_link_checkpoints_with_equal_tensors(keyed: App, of_main: Browser) -> None:
    """A checkpoint's page links to visible checkpoints with the same tensors, with hostile names as text."""
    database = keyed.service.database
    one = add_checkpoint(database, "run/step-1", content_digest="d" * 32)
    names = [name.replace("/", "|") for name in HOSTILE[:2]]
    same = [add_checkpoint(database, f"copies/{name}", content_digest="d" * 32) for name in names]
    hidden = add_checkpoint(database, "secret/step-1", root="other", content_digest="d" * 32)
    alone = add_checkpoint(database, "run/step-2", content_digest="e" * 32)
    page = of_main.page(f"/checkpoints/{one}")
    assert "Same tensors in" in page.text and names[0] in page.text
    assert {f"/checkpoints/{number}" for number in same} <= set(page.links)
    assert f"/checkpoints/{hidden}" not in page.links
    assert "also in" not in of_main.page(f"/checkpoints/{alone}").text
    answer = keyed.client("read").get(f"/api/v1/checkpoints/{one}/lineage").json()
    assert [node["id"] for node in answer["also_in"]] == [hidden, *reversed(same)]
