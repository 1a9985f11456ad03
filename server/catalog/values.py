"""Values from foreign files, made such that both databases take them and give them back alike.

PostgreSQL stores no NUL in text or JSON, neither database a lone surrogate, JSON no NaN; integers end at 63
bits, and an index row of PostgreSQL at 2,704 bytes. A hostile name must not make a whole scan fail.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from dcp.server.catalog.errors import InvalidQueryError

__all__ = [
    "MAX_KEY_BYTES",
    "NONFINITE",
    "check_key",
    "check_label",
    "clean_integer",
    "clean_json",
    "clean_text",
    "short_name",
]

MAX_KEY_BYTES: Final = 1024
NONFINITE: Final = ("nan", "inf", "-inf")
"""Numbers that JSON does not have, as `clean_json` writes them."""
_MAX_NAME_BYTES: Final = 1024
_MAX_INTEGER: Final = (1 << 63) - 1
_MAX_DEPTH: Final = 32
_MAX_JSON_ITEMS: Final = 10_000
_LABEL: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@+=-]{0,127}")
_BAD: Final = re.compile("[\x00\ud800-\udfff]")


def clean_text(text: str) -> str:
    """``text`` with NUL and lone surrogates written out (``\\x00``, ``\\udc80``)."""
    if not _BAD.search(text):
        return text
    return _BAD.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)


def short_name(text: str) -> str:
    """``text`` clean, and if it is too long for an index, cut and followed by a hash of the whole."""
    text = clean_text(text)
    encoded = text.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return text
    mark = f"...{hashlib.sha256(encoded).hexdigest()[:16]}"
    return encoded[: _MAX_NAME_BYTES - len(mark)].decode(errors="ignore") + mark


def clean_integer(value: int) -> int:
    """``value``, or the nearest one that a column holds."""
    return max(-_MAX_INTEGER - 1, min(_MAX_INTEGER, value))


def clean_json(value: Any) -> Any:
    """``value`` as JSON: unknown things and numbers that are not finite as text, depth and size bounded."""
    return _cleaned(value, _MAX_DEPTH, [_MAX_JSON_ITEMS])


def _cleaned(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth == 0 or left[0] < 0:
        return "..."
    match value:
        case None | bool():
            return value
        case int():
            return value if -_MAX_INTEGER <= value <= _MAX_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return clean_text(value)
        case Mapping():
            return {clean_text(str(name)): _cleaned(item, depth - 1, left) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_cleaned(item, depth - 1, left) for item in value]
        case _:
            from dcp.storage.formats.torch.python_values import value_text  # only here: numpy takes its time

            return clean_text(value_text(value)[:1000])


def check_key(key: str) -> str:
    """``key`` if it is a clean relative one; `InvalidQueryError` if not. "" is none."""
    parts = key.split("/")
    if not key or any(part in ("", ".", "..") for part in parts) or "\\" in key or _BAD.search(key):
        raise InvalidQueryError("key", "a relative path of non-empty parts is needed, without . and ..")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidQueryError("key", f"longer than {MAX_KEY_BYTES} bytes")
    return key


def check_label(field: str, name: str) -> str:
    """``name`` if a tag, alias or metric may be called so; `InvalidQueryError` if not."""
    if not _LABEL.fullmatch(name):
        raise InvalidQueryError(
            field,
            "1 to 128 letters, digits and _ . / : @ + = - are taken, the first a letter, digit or _",
        )
    return name
