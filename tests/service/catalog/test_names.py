"""Names, patterns and cursors of any kind: found as Python finds them, kept as they are, or refused."""

from __future__ import annotations

import base64
import fnmatch
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.app import running_app
from tests.support.catalog import Catalog, pages
from tests.support.catalog_rows import add_checkpoint

NAMES = ["step-1", "step-12", "STEP-1", "b.c", "a[1]", "a*b", "a?b", "ab", "a.b", "(a|b)+$^", "ä€😀"]
NAMES += ["%_", "]", "x-]", "{2}"]
GLOBS = [
    r"*",
    r"step-*",
    r"step-?",
    r"?????1",
    r"[a-z]*",
    r"[!a-z]*",
    r"*[0-9]",
    r"*[!0-9]",
    r"a[[]1]",
    r"a[1]",
    r"a[*]b",
    r"a.b",
    r"a?b",
    r"*b*",
    r"**b",
    r"(a|b)+$^",
    r"ä?😀",
    r"??",
    r"%_",
    r"%*",
    r"a\b",
    r"a\?",
    r"]",
    r"x-]",
    r"*]",
    r"{2}",
    r"[",
    r"a[",
    r"[]",
    r"[!]",
    r"[a-]*",
    r"[sS][tT]*",
]
OUR_OWN = {"a[[]1]", "a[*]b", "[a-]*", "[]", "[!]"}
"""Brackets around other things than letters, digits and underscores stand for themselves; no name is so."""
PARTS = ["a", "*", "?", "%", "_", "[1]", "\\", "€", "STEP", "step-1", ".", "|"]


@pytest.mark.each_database  # their SQL differs
def test_patterns_match_what_fnmatch_does(catalog: Catalog) -> None:
    """Every glob and every part with every name; names are sorted by code point, whatever the language."""
    for name in NAMES:
        add_checkpoint(catalog.app.service.database, f"run/{name}", step=1)

    def found(**query: Any) -> list[str]:
        return [one["name"] for one in pages(catalog.http, "/checkpoints", **query)]

    assert found(sort="name", limit=5) == sorted(NAMES)
    for glob in GLOBS:
        fitting = {name for name in NAMES if fnmatch.fnmatchcase(name, glob)}
        assert {*found(name_glob=glob)} == (set() if glob in OUR_OWN else fitting), glob
    for part in PARTS:
        assert {*found(name_contains=part)} == {name for name in NAMES if part in name}, part


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """One for all, with two checkpoints."""
    folder = tmp_path_factory.mktemp("names")
    with running_app(f"sqlite:///{folder / 'catalog.sqlite'}", folder, rate_limit="1000000/minute") as app:
        made = Catalog(app, folder)
        for step in (1, 2):
            made.add(f"run/step-{step}")
        yield made


FORGED: list[list[Any]] = [
    *([True, 1], [1, None], ["1", 1], [2**63, 1], [1], [1, 1, 1], [[1], 1], [1, 2**63]),
    *([float("inf"), 1], [1, 1.5], [None, None], []),
]


def test_a_forged_cursor_has_the_right_types_or_none(local: Catalog) -> None:
    """What the database would choke on does not get there; with its own values it goes on."""
    cursor = local.get("/checkpoints", sort="-step", limit=1)["next_cursor"]
    parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    for given_, status in ((parts[2:], 200), *((values, 422) for values in FORGED)):
        text = json.dumps([*parts[:2], *given_], separators=(",", ":")).encode()
        made = base64.urlsafe_b64encode(text).decode().rstrip("=")
        query = {"sort": "-step", "limit": 1, "cursor": made}
        assert local.status("GET", "/checkpoints", params=query) == status
