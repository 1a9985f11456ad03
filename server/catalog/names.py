"""Names: find parts and globs in them, on both databases alike, and tell the layers of tensors.

Case matters, and `*` crosses `/`. A glob has `*`, `?` and `[...]` (`[!...]` is "none of"), as `fnmatch` has.
In brackets are letters, digits and underscores, single or as ranges such as `a-f`; brackets around anything
else stand for themselves.
"""

from __future__ import annotations

import re
import string
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.inputs import UNSTORABLE, clean_text

_MAX_CHARACTERS: Final = 256
_MAX_STARS: Final = 8
_SET: Final = re.compile(r"(!?)((?:[0-9](?:-[0-9])?|[A-Z](?:-[A-Z])?|[a-z](?:-[a-z])?|_)+)\]")
_NUMBER: Final = re.compile("[0-9]+")
_SMALL: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def check_pattern(field: str, pattern: str) -> str:
    """``pattern`` if it may be searched for; `InvalidQueryError` if not. More stars take longer to match."""
    check_text(field, pattern)
    sets = [text for kind, text in _tokens(pattern) if kind in ("of", "not of")]
    if any(found[0] > found[2] for text in sets for found in re.findall(r"\w-\w", text)):
        raise InvalidQueryError(field, "a range in brackets is the wrong way round")
    if re.sub(r"\*+", "*", pattern).count("*") > _MAX_STARS:
        raise InvalidQueryError(field, f"{_MAX_STARS} stars at most")
    return pattern


def check_text(field: str, text: str) -> str:
    """``text`` if it may be searched for as it stands; `InvalidQueryError` if not."""
    if not text or len(text) > _MAX_CHARACTERS or UNSTORABLE.search(text):
        raise InvalidQueryError(field, f"1 to {_MAX_CHARACTERS} characters, without NUL")
    return text


def fold(text: str) -> str:
    """In small letters, as both databases do it: those from A to Z."""
    return text.translate(_SMALL)


def pattern_of(name: str) -> str:
    """Return the name in lower case with "#" for each number: the same for names that differ by these
    only."""
    return _NUMBER.sub("#", fold(name))


def is_glob(pattern: str) -> bool:
    """Return True for a pattern with characters that are special in globs."""
    return any(character in pattern for character in "*?[")


def contains(connection: Connection, column: ColumnElement[Any], part: str) -> ColumnElement[bool]:
    """``column`` has ``part`` in it."""
    if connection.dialect.name == "postgresql":
        return func.strpos(column, part) > 0
    return func.instr(column, part) > 0


def matches(connection: Connection, column: ColumnElement[Any], glob: str) -> ColumnElement[bool]:
    """Return the condition that all of ``column`` matches ``glob``."""
    tokens = _tokens(glob)
    if connection.dialect.name == "postgresql":
        return column.regexp_match("^(?:" + "".join(map(_as_regex, tokens)) + ")$")
    return column.op("GLOB", is_comparison=True)("".join(map(_as_sqlite, tokens)))


_Token = tuple[str, str]
"""A kind ("any", "one", "of", "not of", "text"), and the characters."""


def _tokens(glob: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while position < len(glob):
        character = glob[position]
        position += 1
        if character == "*":
            if not tokens or tokens[-1][0] != "any":
                tokens.append(("any", ""))
        elif character == "?":
            tokens.append(("one", ""))
        elif character == "[" and (found := _SET.match(glob, position)):
            tokens.append(("not of" if found[1] else "of", found[2]))
            position = found.end()
        else:
            tokens.append(("text", character))
    return tokens


def _as_regex(token: _Token) -> str:
    kind, text = token
    if kind == "text":
        return f"\\U{ord(text):08x}"
    return {"any": ".*", "one": ".", "of": f"[{text}]", "not of": f"[^{text}]"}[kind]


def _as_sqlite(token: _Token) -> str:
    kind, text = token
    if kind == "text":
        return f"[{text}]" if text in "*?[" else text
    return {"any": "*", "one": "?", "of": f"[{text}]", "not of": f"[^{text}]"}[kind]


# -- layers, as names of tensors tell them -------------------------------------------------------------------


_NUMBERED: Final = re.compile(r"(.*?(?:^|[._])[0-9]+)\.", re.DOTALL)
_OF_OPTIMIZER: Final = re.compile(r"(?:.*_)?optim(?:i[sz]er)?s?(?:_.*|[0-9]+)?", re.DOTALL | re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(?:^|[._])([0-9]{1,9})$")


def layer_of(fqn: str) -> str:
    """Return a name to its first number that stands by itself and has something below it, as of a block of a
    model (``layers.3`` or ``layers_3``); without one, to its last dot."""
    numbered = _NUMBERED.match(fqn)
    return clean_text(numbered[1] if numbered else fqn.rpartition(".")[0] or fqn)


def is_of_optimizer(fqn: str) -> bool:
    """Return True if its first or second part names an optimizer: ``optimizer.state.0``, ``app.optim.w``."""
    return any(_OF_OPTIMIZER.fullmatch(name) for name in fqn.split(".", 2)[:2])


def layer_number(fqn: str) -> int | None:
    """Return the number at the end of its layer; None if it has none."""
    found = _LAST_NUMBER.search(layer_of(fqn))
    return None if found is None else int(found[1])


def in_order(name: str) -> list[Any]:
    """As people count: layers.2 before layers.10."""
    parts = re.split(r"([0-9]+)", name)
    return [_counted(part) if place % 2 else part for place, part in enumerate(parts)]


def _counted(digits: str) -> tuple[int, str]:
    digits = digits.lstrip("0")
    return len(digits), digits  # as numbers are ordered; int refuses thousands of digits
