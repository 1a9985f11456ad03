"""Configurations of models (``config.json``), and sizes of axes as expressions of their names.

Such as ``head_dim or hidden_size // num_attention_heads``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from dcp.storage.errors import OptionError
from dcp.storage.stores.base import Store

__all__ = ["CONFIG", "MAX_CONFIG_BYTES", "config_at", "config_of", "evaluate", "model_config", "names_in"]

CONFIG: Final[str] = "config.json"
MAX_CONFIG_BYTES: Final = 4 << 20


def model_config(store: Store) -> Mapping[str, Any]:
    """Read the configuration in the file beside a checkpoint's weights; empty where there is none.
    OptionError as of `config_of`."""
    if store.stat(CONFIG) is None:
        return {}
    return config_of(store.read(CONFIG, limit_bytes=MAX_CONFIG_BYTES), f"{CONFIG} of {store.url}")


def config_at(path: Path) -> Mapping[str, Any]:
    """Read the configuration of a file, or of a model's folder. OptionError if it cannot be read, and as
    of `config_of`."""
    path = path / CONFIG if path.is_dir() else path
    try:
        with path.open(encoding="utf-8") as file:
            return config_of(file.read(MAX_CONFIG_BYTES), str(path))
    except OSError as error:
        raise OptionError(f"config: {path} cannot be read: {error.strerror}") from error


def config_of(text: str | bytes, where: str) -> Mapping[str, Any]:
    """Return a model's configuration of JSON; of one with a text model within, that has the first word.

    OptionError for anything else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{where} is no table")
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else found


# -- expressions of its names --------------------------------------------------------------------------------


_MAX_LENGTH: Final = 200
_MAX_SIZE: Final = 1 << 48


def evaluate(text: str, names: Mapping[str, Any]) -> int | None:
    """Return the value of an expression of whole numbers, names, ``+ - * // ( )``, ``not``, ``and`` and
    ``or``.

    None where a name is needed that is not known, or is None. ``or`` takes the first that is known and not
    0; ``and`` the last, if those before it are known and not 0, and else 0. OptionError for any other
    expression, or where a name is no whole number.
    """
    return _value(_parsed(text), names, text)


def names_in(text: str) -> frozenset[str]:
    """Return the names in an expression."""
    return frozenset(node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    if len(text) <= _MAX_LENGTH:
        try:
            return ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    raise OptionError(f"{text[:_MAX_LENGTH]!r} is no expression of names and whole numbers")


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> int | None:
    match node:
        case ast.Constant(value=bool() | int() as number) if number <= _MAX_SIZE:
            return int(number)
        case ast.Name(id=name):
            return _named(name, names.get(name))
        case ast.BoolOp(op=ast.Or(), values=parts):
            values = [value for part in parts if (value := _value(part, names, text)) is not None]
            return next(filter(None, values), 0 if values else None)
        case ast.BoolOp(op=ast.And(), values=[*conditions, last]):
            is_met = all(_value(part, names, text) for part in conditions)
            return _value(last, names, text) if is_met else 0
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, names, text))
        case ast.BinOp(left=left, op=op, right=right):
            low, high = _value(left, names, text), _value(right, names, text)
            return None if low is None or high is None else _combined(low, op, high, text)
    raise OptionError(f"{text!r} is no expression of names, whole numbers, + - * //, not, and, or")


def _combined(low: int, op: ast.operator, high: int, text: str) -> int:
    match op:
        case ast.Add():
            found = low + high
        case ast.Sub():
            found = low - high
        case ast.Mult():
            found = low * high
        case ast.FloorDiv() if high:
            found = low // high
        case _:
            raise OptionError(f"{text!r}: what may be done is + - * //, and that not by 0")
    if abs(found) > _MAX_SIZE:
        raise OptionError(f"{text!r} is too large")
    return found


def _named(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or abs(value) > _MAX_SIZE:
        raise OptionError(f"{name} should be a whole number, and is {value!r}"[:_MAX_LENGTH])
    return int(value)
