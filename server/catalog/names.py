"""Names: substring and glob conditions equal on both databases, and layers of tensors.

Matching is case-sensitive, and `*` crosses `/`. Globs have `*`, `?` and `[...]` (`[!...]` negates) like
`fnmatch`. Brackets accept letters, digits, underscores and ranges such as `a-f`; other brackets are literal.
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
    """Return ``pattern`` if it is a valid glob. Raises `InvalidQueryError`; stars are limited."""
    check_text(field, pattern)
    sets = [text for kind, text in _tokens(pattern) if kind in ("of", "not of")]
    if any(found[0] > found[2] for text in sets for found in re.findall(r"\w-\w", text)):
        raise InvalidQueryError(field, "the glob has a reversed range, such as [z-a]")
    if re.sub(r"\*+", "*", pattern).count("*") > _MAX_STARS:
        raise InvalidQueryError(field, f"a glob has {_MAX_STARS} stars at most")
    return pattern


def check_text(field: str, text: str) -> str:
    """Return ``text`` if it is a valid search text. Raises `InvalidQueryError`."""
    if not text or len(text) > _MAX_CHARACTERS or UNSTORABLE.search(text):
        raise InvalidQueryError(field, f"must have 1 to {_MAX_CHARACTERS} characters, without NUL")
    return text


def fold(text: str) -> str:
    """Lower the letters A to Z, as both databases do."""
    return text.translate(_SMALL)


def pattern_of(name: str) -> str:
    """Return the name in lower case with "#" for each number."""
    return _NUMBER.sub("#", fold(name))


def is_glob(pattern: str) -> bool:
    """Return True if the pattern contains special characters of globs."""
    return any(character in pattern for character in "*?[")


def contains(connection: Connection, column: ColumnElement[Any], part: str) -> ColumnElement[bool]:
    """Return the condition that ``column`` contains ``part``."""
    if connection.dialect.name == "postgresql":
        return func.strpos(column, part) > 0
    return func.instr(column, part) > 0


def matches(connection: Connection, column: ColumnElement[Any], glob: str) -> ColumnElement[bool]:
    """Return the condition that the whole ``column`` matches ``glob``."""
    tokens = _tokens(glob)
    if connection.dialect.name == "postgresql":
        return column.regexp_match("^(?:" + "".join(map(_as_regex, tokens)) + ")$")
    return column.op("GLOB", is_comparison=True)("".join(map(_as_sqlite, tokens)))


_Token = tuple[str, str]
"""A kind ("any", "one", "of", "not of", "text") with its characters."""


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


# -- layers of tensors --------------------------------------------------------------------------------------


_NUMBERED: Final = re.compile(r"(.*?(?:^|[._])[0-9]+)\.", re.DOTALL)
_OF_OPTIMIZER: Final = re.compile(r"(?:.*_)?optim(?:i[sz]er)?s?(?:_.*|[0-9]+)?", re.DOTALL | re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(?:^|[._])([0-9]{1,9})$")


def layer_of(fqn: str) -> str:
    """Return the name up to its first separate inner number (``layers.3`` or ``layers_3``), or else up to
    the last dot."""
    numbered = _NUMBERED.match(fqn)
    return clean_text(numbered[1] if numbered else fqn.rpartition(".")[0] or fqn)


def is_of_optimizer(fqn: str) -> bool:
    """Return True if the first or second part names an optimizer: ``optimizer.state.0``, ``app.optim.w``."""
    return any(_OF_OPTIMIZER.fullmatch(name) for name in fqn.split(".", 2)[:2])


def layer_number(fqn: str) -> int | None:
    """Return the number at the end of the layer name, or None."""
    found = _LAST_NUMBER.search(layer_of(fqn))
    return None if found is None else int(found[1])


def in_order(name: str) -> list[Any]:
    """Sort naturally: layers.2 before layers.10."""
    parts = re.split(r"([0-9]+)", name)
    return [_counted(part) if place % 2 else part for place, part in enumerate(parts)]


def _counted(digits: str) -> tuple[int, str]:
    digits = digits.lstrip("0")
    return len(digits), digits  # numeric order; int refuses thousands of digits
