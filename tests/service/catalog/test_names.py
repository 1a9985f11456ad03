"""Patterns, cursors and layers. Internal: pure functions, compared with fnmatch and with themselves."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert, select

from dcp.server.catalog.contents.layers import in_order, is_of_optimizer, layer_number, layer_of
from dcp.server.catalog.cursors import decode_cursor, encode_cursor
from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.name_patterns import check_pattern, contains, matches
from dcp.server.catalog.values import clean_json, clean_text, short_name
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoint_names

pytestmark = pytest.mark.each_database  # their SQL differs

NAMES = [
    "step-1",
    "step-12",
    "STEP-1",
    "a/b.c",
    "a[1]",
    "a*b",
    "a?b",
    "ab",
    "a\\b",
    "a.b",
    "(a|b)+$^",
    "ä€😀",
    "a\nb",
    "%_",
    "]",
    "x-]",
    "{2}",
]
GLOBS = [
    "*",
    "step-*",
    "step-?",
    "?????1",
    "[a-z]*",
    "[!a-z]*",
    "*[0-9]",
    "*[!0-9]",
    "a[[]1]",
    "a[1]",
    "a[*]b",
    "a.b",
    "a?b",
    "*b*",
    "**b",
    "(a|b)+$^",
    "ä?😀",
    "??",
    "%_",
    "%*",
    "a\\b",
    "a\\?",
    "]",
    "x-]",
    "*]",
    "{2}",
    "[",
    "a[",
    "[]",
    "[!]",
    "[a-]*",
    "*\n*",
    "[sS][tT]*",
]
OUR_OWN = {"a[[]1]", "a[*]b", "[a-]*", "[]", "[!]"}
"""Brackets around other things than letters, digits and underscores stand for themselves; no name is so."""


@pytest.fixture
def named(database: Database) -> Database:
    """A database with `NAMES`."""
    with database.write() as connection:
        connection.execute(insert(checkpoint_names), [{"name": name} for name in NAMES])
    return database


def test_globs_match_what_fnmatch_does(named: Database) -> None:
    """Every glob with every name, on the database."""
    column = checkpoint_names.c.name
    with named.read() as connection:
        for glob in GLOBS:
            check_pattern("glob", glob)
            query = select(column).where(matches(connection, column, glob))
            found = set(connection.execute(query).scalars())
            fitting = {name for name in NAMES if fnmatch.fnmatchcase(name, glob)}
            assert found == (set() if glob in OUR_OWN else fitting), glob


def test_parts_are_found_as_they_stand(named: Database) -> None:
    """No character means anything."""
    column = checkpoint_names.c.name
    with named.read() as connection:
        for part in ("a", "*", "?", "%", "_", "[1]", "\\", "€", "\n", "STEP", "step-1", ".", "|"):
            query = select(column).where(contains(connection, column, part))
            assert set(connection.execute(query).scalars()) == {name for name in NAMES if part in name}, part


def test_names_are_sorted_by_code_point(named: Database) -> None:
    """On PostgreSQL too, whatever the language of the server."""
    column = checkpoint_names.c.name
    with named.read() as connection:
        assert list(connection.execute(select(column).order_by(column)).scalars()) == sorted(NAMES)


@given(
    mark=st.text(max_size=8),
    values=st.tuples(
        st.integers(-(2**63) + 1, 2**63 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
    ),
)
def test_cursors_come_back_as_they_went(mark: str, values: tuple[int, float, str]) -> None:
    """Whatever is sorted by; text that no database takes is refused."""
    cursor = encode_cursor(mark, *values)
    if "\x00" in values[2] or any("\ud800" <= character <= "\udfff" for character in values[2]):
        with pytest.raises(InvalidQueryError):
            decode_cursor(cursor, mark, int, float, str)
    else:
        assert decode_cursor(cursor, mark, int, float, str) == values


@given(cursor=st.one_of(st.text(), st.text("ABCDabcd0123_-=", max_size=40)))
def test_any_other_word_is_no_cursor(cursor: str) -> None:
    """Refused in words, whatever it is."""
    with pytest.raises(InvalidQueryError, match="cursor"):
        decode_cursor(cursor, "m", int)


@pytest.mark.parametrize(
    "values",
    [(True, 1), (1, None), (1.5, 1), ("1", 1), (2**63, 1), (1,), (1, 1, 1), ([1], 1), (float("inf"), 1)],
)
def test_a_forged_cursor_has_the_right_types_or_none(values: tuple[Any, ...]) -> None:
    """What the database would choke on does not get there."""
    with pytest.raises(InvalidQueryError):
        decode_cursor(encode_cursor("m", *values), "m", int, int)


@given(st.text(st.characters(codec=None), max_size=50))
def test_clean_text_can_be_stored(text: str) -> None:
    """Encodable, without NUL, and itself where it was clean before."""
    found = clean_text(text)
    found.encode()
    assert "\x00" not in found
    assert clean_text(found) == found


@given(st.text(max_size=3000))
def test_short_names_fit_into_an_index_and_stay_apart(text: str) -> None:
    """1,024 bytes at most; two long ones that begin alike differ."""
    assert len(short_name(text).encode()) <= 1024
    assert short_name("x" * 2000 + text) != short_name("x" * 2000 + text + "y")


_json = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_json)
def test_clean_json_is_clean(value: Any) -> None:
    """Cleaning again changes nothing: what is read back compares equal to what comes from the file again."""
    found = clean_json(value)
    assert clean_json(found) == found


@pytest.mark.parametrize(
    ("fqn", "layer", "number"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3", 3),
        ("layers.12.weight", "layers.12", 12),
        ("0.weight", "0", 0),
        ("model.layers_2.weight", "model.layers_2", 2),
        ("model.layers_2.attention.q.weight", "model.layers_2", 2),
        ("experts.7.layers.1.w", "experts.7", 7),
        ("model.block3.conv.weight", "model.block3.conv", None),
        ("model.norm.weight", "model.norm", None),
        ("weights.3", "weights", None),
        ("head", "head", None),
        ("", "", None),
        (".", ".", None),
        ("a\nb.1.w", "a\nb.1", 1),
        ("\x00.1.w", "\\x00.1", 1),
        (f"layers.{'9' * 5000}.w", f"layers.{'9' * 5000}", None),
    ],
)
def test_layers(fqn: str, layer: str, number: int | None) -> None:
    """To the first number that stands by itself and has something below it; else to the last dot."""
    assert (layer_of(fqn), layer_number(fqn)) == (layer, number)


@pytest.mark.parametrize(
    ("fqn", "is_of"),
    [
        ("optimizer.state.0.exp_avg", True),
        ("app.optimizer.state.w", True),
        ("optim", True),
        ("adam_optim_0.w", True),
        ("Optimisers.1", True),
        ("model.optimal.weight", False),
        ("model.blocks.optimizer", False),
        ("", False),
    ],
)
def test_of_an_optimizer(fqn: str, is_of: bool) -> None:
    """By its first two names."""
    assert is_of_optimizer(fqn) == is_of


def test_layers_are_in_order_as_people_count() -> None:
    """Also those whose numbers have thousands of digits, which `int` refuses."""
    names = ["a", "layers.2", "layers.10", "layers.10.b", f"layers.{'1' * 5000}", f"layers.{'2' * 5000}"]
    shuffled = sorted(names)
    assert shuffled != names and sorted(shuffled, key=in_order) == names
