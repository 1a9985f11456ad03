"""Names, axes and sizes of the tensors in a weight map's rule.

Names may have variable parts: ``{layer}`` is a number, ``{part:a|b}`` one of several words, ``{rest:*}`` any
text.

Axes describe the layout of a tensor, in the notation of einops: ``(group (q + k + v)) width``. Dimensions go
from left to right; axes in parentheses share a dimension, the last is the fastest. ``+`` concatenates parts.
Equal axes on both sides of a rule hold equal elements, which expresses fusing, splitting, transposing,
permuting, reshaping and padding.

Sizes are numbers, or expressions of names in a model's configuration.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp.storage.errors import OptionError, PlanError
from dcp.storage.stores.base import Store

_TOKEN: Final = re.compile(r"[A-Za-z_]\w*|[()+]")
_MAX_NESTING: Final = 8
_MAX_TERMS: Final = 4096


class _Product(NamedTuple):
    factors: tuple[_Node, ...]


class _Sum(NamedTuple):
    parts: tuple[_Node, ...]


_Node = str | _Product | _Sum


class AxisPlaces(NamedTuple):
    """Positions of some axes in a tensor: dimension and stride by axis; ``base`` is the position of the first
    element."""

    dims: Mapping[str, int]
    steps: Mapping[str, int]
    base: tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """Dimensions of one tensor."""

    text: str
    nodes: tuple[_Node, ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Axes:
        """Parse the text of axes. Raises OptionError for syntax errors and repeated axes."""
        nodes = _parsed_axes(text)
        if _count(_Product(nodes)) > _MAX_TERMS:
            raise OptionError(f"the axes {text[:100]!r}... have more than {_MAX_TERMS} parts")
        found = cls(text, nodes)
        if any(len(set(names)) < len(names) for names in found.ways):
            raise OptionError(f"the axes {text!r} repeat an axis")
        return found

    @cached_property
    def ways(self) -> list[tuple[str, ...]]:
        """Axes of each choice of `terms`."""
        return _alternatives(_Product(self.nodes))

    @property
    def names(self) -> list[str]:
        """Names of all axes, each once."""
        return list(dict.fromkeys(name for node in self.nodes for name in _names(node)))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape. KeyError for an unknown axis."""
        return tuple(_size(node, sizes) for node in self.nodes)

    def solve(self, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        """Add the sizes that follow from ``shape``. PlanError for contradictions, and for dimensions with
        several unknown axes."""
        if len(shape) != len(self.nodes):
            raise PlanError(
                f"the tensor has {len(shape)} dimensions, but the axes {self.text!r} have {len(self.nodes)}"
            )
        known = dict(sizes)
        left = list(zip(self.nodes, shape, strict=True))
        while left:  # a dimension may give a size needed by another dimension
            ready = [(node, extent) for node, extent in left if len(_unknown(node, known)) <= 1]
            if not ready:
                raise PlanError(
                    f"the sizes of {' and '.join(_unknown(left[0][0], known))} in {self.text!r} are not known"
                )
            node, extent = ready[0]
            left.remove(ready[0])
            for name in _unknown(node, known):
                known[name] = self._solve(node, extent, known, name)
            for name in _names(node):
                if known[name] < 0:
                    raise PlanError(f"the axes {self.text!r} have the negative size {name} = {known[name]}")
            if _size(node, known) != extent:
                shown = ", ".join(f"{name} = {known[name]}" for name in dict.fromkeys(_names(node)))
                raise PlanError(
                    f"a dimension of the tensor has size {extent}, but the axes {self.text!r} give "
                    f"{_size(node, known)} ({shown})"
                )
        return known

    def _solve(self, node: _Node, extent: int, known: Mapping[str, int], name: str) -> int:
        base = _size(node, {**known, name: 0})
        slope = _size(node, {**known, name: 1}) - base
        value, rest = divmod(extent - base, slope) if slope else (0, 1)
        if rest or value < 0:
            raise PlanError(
                f"no size of {name} in the axes {self.text!r} gives the dimension of size {extent}"
            )
        return value

    def terms(self, sizes: Mapping[str, int]) -> list[AxisPlaces]:
        """Return one term for each choice of the sums; together they cover each element once."""
        by_dim = [list(_expand(node, 1, sizes)) for node in self.nodes]
        return [
            AxisPlaces(
                {name: dim for dim, (steps, _) in enumerate(dims) for name in steps},
                {name: step for steps, _ in dims for name, step in steps.items()},
                tuple(offset for _, offset in dims),
            )
            for dims in product(*by_dim)
        ]


def _parsed_axes(text: str) -> tuple[_Node, ...]:
    if rest := _TOKEN.sub(" ", text).split():
        raise OptionError(f"axes {text!r}: {rest[0]!r} is not an axis name, parenthesis or +")
    tokens = _TOKEN.findall(text)[::-1]  # reversed, to pop the next token from the end

    def factors(depth: int) -> tuple[_Node, ...]:
        """Take axes and parentheses up to ``)``, ``+`` or the end."""
        if depth > _MAX_NESTING:
            raise OptionError(f"axes {text!r}: parentheses are nested deeper than {_MAX_NESTING}")
        found: list[_Node] = []
        while tokens and tokens[-1] not in (")", "+"):
            token = tokens.pop()
            found.append(parenthesis(depth + 1) if token == "(" else token)
        return tuple(found)

    def parenthesis(depth: int) -> _Node:
        parts: list[_Node] = []
        end = "+"
        while end == "+":
            own = factors(depth)
            if not own:
                raise OptionError(f"axes {text!r}: empty parentheses, or an operand of + is missing")
            if not tokens:
                raise OptionError(f"axes {text!r}: a parenthesis is not closed")
            parts.append(own[0] if len(own) == 1 else _Product(own))
            end = tokens.pop()
        return parts[0] if len(parts) == 1 else _Sum(tuple(parts))

    nodes = factors(0)
    if tokens:
        raise OptionError(f"axes {text!r}: unexpected {tokens[-1]!r}")
    return nodes


def _names(node: _Node) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node[0]:
            yield from _names(child)


def _unknown(node: _Node, known: Mapping[str, int]) -> list[str]:
    return list(dict.fromkeys(name for name in _names(node) if name not in known))


def _alternatives(node: _Node) -> list[tuple[str, ...]]:
    """Return the axes of each way through the sums."""
    if isinstance(node, str):
        return [(node,)]
    if isinstance(node, _Sum):
        return [names for part in node.parts for names in _alternatives(part)]
    ways = product(*map(_alternatives, node.factors))
    return [tuple(name for names in way for name in names) for way in ways]


def _count(node: _Node) -> int:
    """Count the ways through the sums."""
    if isinstance(node, str):
        return 1
    counts = map(_count, node[0])
    return sum(counts) if isinstance(node, _Sum) else math.prod(counts)


def _size(node: _Node, sizes: Mapping[str, int]) -> int:
    if isinstance(node, str):
        return sizes[node]
    extents = [_size(child, sizes) for child in node[0]]
    return sum(extents) if isinstance(node, _Sum) else math.prod(extents)


def _expand(node: _Node, step: int, sizes: Mapping[str, int]) -> Iterator[tuple[dict[str, int], int]]:
    """Yield (stride by axis, offset) of each choice of the sums along a dimension."""
    if isinstance(node, str):
        yield {node: step}, 0
    elif isinstance(node, _Sum):
        offset = 0
        for part in node.parts:
            for steps, own in _expand(part, step, sizes):
                yield steps, offset + own
            offset += _size(part, sizes) * step
    else:
        ways: list[tuple[dict[str, int], int]] = [({}, 0)]
        for factor in reversed(node.factors):
            found = list(_expand(factor, step, sizes))
            ways = [({**steps, **own}, at + offset) for steps, at in found for own, offset in ways]
            step *= _size(factor, sizes)
        yield from ways


_PART: Final = re.compile(r"\{([A-Za-z_]\w*)(?::([^{}]*))?\}", re.ASCII)
_NUMBER: Final = r"0|[1-9][0-9]{0,8}"
_HALF: Final = re.compile("[\ud800-\udfff]")
_MAX_PARTS: Final = 8
_MAX_ANY: Final = 2
"""Matching takes the length of a name to this power."""


@dataclass(frozen=True)
class NamePattern:
    """A tensor name, possibly with variable parts."""

    text: str

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> NamePattern:
        """Parse a name. Raises OptionError for syntax errors."""
        found = cls(text)
        rest = _PART.sub("", text)
        if not text or "{" in rest or "}" in rest:
            raise OptionError(
                f"{text!r} is not a valid name: write a variable part as {{part}}, {{part:a|b}} or {{part:*}}"
            )
        if _HALF.search(text):
            raise OptionError(f"{text!r} is not a valid name: it contains a lone surrogate")
        if len(set(found.parts)) < len(found.parts):
            raise OptionError(f"the name {text!r} repeats a variable part")
        if len(found.parts) > _MAX_PARTS or len(found.parts_of_anything) > _MAX_ANY:
            raise OptionError(
                f"the name {text!r} has more than {_MAX_PARTS} variable parts, or {_MAX_ANY} wildcards (*)"
            )
        return found

    def below(self, prefix: str) -> NamePattern:
        """Return the pattern with ``prefix`` before the name."""
        return NamePattern.parse(prefix + self.text)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the variable parts."""
        return tuple(part[1] for part in _PART.finditer(self.text))

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Names of the parts that are numbers."""
        return frozenset(part[1] for part in _PART.finditer(self.text) if part[2] is None)

    @cached_property
    def parts_of_anything(self) -> frozenset[str]:
        """Names of the parts that match any text."""
        return frozenset(part[1] for part in _PART.finditer(self.text) if part[2] == "*")

    def match(self, name: str) -> dict[str, str] | None:
        """Return the variable parts of ``name``, or None without a match."""
        if not name.startswith(self._head):
            return None
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def format(self, parts: Mapping[str, str]) -> str:
        """Return the name with these parts. KeyError for a missing part."""
        return _PART.sub(lambda part: parts[part[1]], self.text)

    @cached_property
    def _head(self) -> str:
        return self.text.split("{", 1)[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        """Regular expression with possessive numbers and words, to bound the time of a match."""
        pieces: list[str] = []
        at = 0
        for part in _PART.finditer(self.text):
            name, words = part[1], part[2]
            if words is None:
                own = f"(?>{_NUMBER})"
            elif words == "*":
                own = ".+"
            else:
                longest = sorted(words.split("|"), key=len, reverse=True)
                own = f"(?>{'|'.join(map(re.escape, longest))})"
            pieces += re.escape(self.text[at : part.start()]), f"(?P<{name}>{own})"
            at = part.end()
        return re.compile("".join(pieces) + re.escape(self.text[at:]), re.DOTALL)


CONFIG: Final[str] = "config.json"


MAX_CONFIG_BYTES: Final = 4 << 20


def model_config(store: Store) -> Mapping[str, Any]:
    """Read ``config.json`` beside a checkpoint's weights; empty if missing. OptionError as `config_of`."""
    if store.stat(CONFIG) is None:
        return {}
    return config_of(store.read(CONFIG, limit_bytes=MAX_CONFIG_BYTES), f"{CONFIG} of {store.url}")


def config_at(path: Path) -> Mapping[str, Any]:
    """Read the configuration from a file or a model folder. OptionError if unreadable."""
    path = path / CONFIG if path.is_dir() else path
    try:
        with path.open(encoding="utf-8") as file:
            return config_of(file.read(MAX_CONFIG_BYTES), str(path))
    except OSError as error:
        raise OptionError(f"the configuration {path} (config=) cannot be read: {error.strerror}") from error


def config_of(text: str | bytes, where: str) -> Mapping[str, Any]:
    """Parse a model's configuration from JSON; an inner text model's values take precedence.

    OptionError for invalid content.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{where} is not a JSON object")
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else found


_MAX_LENGTH: Final = 200
_MAX_SIZE: Final = 1 << 48
_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate(text: str, names: Mapping[str, Any]) -> int | None:
    """Evaluate an expression of integers, names, ``+ - * // ( )``, ``not``, ``and`` and ``or``.

    Returns None if a required name is unknown or None. ``or`` returns the first known value except 0. ``and``
    returns the last value if all values before are known and not 0, else 0. OptionError for other
    expressions, and for names that are not integers.
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
    raise OptionError(f"{text[:_MAX_LENGTH]!r} is not an expression of names and whole numbers")


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> int | None:
    match node:
        case ast.Constant(value=bool() | int() as number) if number <= _MAX_SIZE:
            return int(number)
        case ast.Name(id=name):
            value = names.get(name)
            if value is not None and (not isinstance(value, int) or abs(value) > _MAX_SIZE):
                raise OptionError(f"{name} must be a whole number, not {value!r}"[:_MAX_LENGTH])
            return None if value is None else int(value)
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
    raise OptionError(f"{text!r} is not an expression of names, whole numbers, + - * //, not, and, or")


def _combined(low: int, op: ast.operator, high: int, text: str) -> int:
    operation = _OPERATIONS.get(type(op))
    if operation is None or (operation is operator.floordiv and not high):
        raise OptionError(f"{text!r} has an operator other than + - * //, or divides by 0")
    found = operation(low, high)
    if abs(found) > _MAX_SIZE:
        raise OptionError(f"the value of {text!r} is larger than {_MAX_SIZE}")
    return found
