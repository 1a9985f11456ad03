"""JSON that others wrote, parsed in memory that its size bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dcp.storage.errors import CheckpointFormatError

__all__ = ["parse_json"]

_MAX_COUNTS: Final = ((b'"', 4_000_000, "strings"), (b"[", 1_000_000, "lists"), (b",", 4_000_000, "values"))
"""In 32 MiB that is enough for 300,000 tensors. JSON that is small and makes a lot of objects of itself must
not reach the parser, which has made them before anybody can look."""


def parse_json(
    text: bytes, what: str, convert: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Return a JSON object; CheckpointFormatError, which calls it ``what``, if it is none or has a key twice.

    ``convert`` may put something else in the place of an object.
    """
    for mark, limit, kind in _MAX_COUNTS:
        if text.count(mark) > limit:
            raise CheckpointFormatError(f"{what} has more {kind} than any checkpoint needs")
    try:
        document = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=partial(_unique, what, convert),
            parse_constant=partial(_no_constant, what),
        )
    except CheckpointFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{what} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointFormatError(f"{what} is not a JSON object")
    return document


def _unique(what: str, convert: Callable[[dict[str, Any]], Any] | None, pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CheckpointFormatError(f"{what} has one key twice")
    for key in result:
        if not key.isascii() and any("\ud800" <= char <= "\udfff" for char in key):
            raise CheckpointFormatError(f"a key of {what} is not Unicode text")
    return result if convert is None else convert(result)


def _no_constant(what: str, name: str) -> Any:
    raise CheckpointFormatError(f"{what} has {name}, which is not JSON")
