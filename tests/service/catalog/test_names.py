"""Names and patterns with special characters: matches are the same as in Python."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

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
"""Globs whose brackets have other content than letters, digits and underscores are taken literally."""
PARTS = ["a", "*", "?", "%", "_", "[1]", "\\", "€", "STEP", "step-1", ".", "|"]


@pytest.mark.each_database  # their SQL differs
def test_patterns_match_as_in_fnmatch(catalog: Catalog) -> None:
    """Each glob and substring selects the same names as in Python; names are sorted by code point."""
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
