"""Named axes that a tensor is made of: ``(group (q + k + v)) width``.

As in einops: dimensions from left to right; in parentheses several axes are one dimension, the last the
fastest. With ``+`` parts stand one behind the other. Axes of the same names on both sides of a rule are the
same elements; so fusing and splitting, transposing, permuting heads, reshaping and padding are one thing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Final, NamedTuple

from dcp.storage.errors import OptionError, PlanError

__all__ = ["Axes", "AxisPlaces"]

_TOKEN: Final = re.compile(r"\s*([A-Za-z_]\w*|[()+])")
_MAX_NESTING: Final = 8
_MAX_TERMS: Final = 4096


class _Product(NamedTuple):
    factors: tuple[_Node, ...]


class _Sum(NamedTuple):
    parts: tuple[_Node, ...]


_Node = str | _Product | _Sum


class AxisPlaces(NamedTuple):
    """Some axes of a tensor, and where their elements are: by axis the dimension, and the step along that
    from one index to the next; ``base`` is the position of the first element."""

    dims: Mapping[str, int]
    steps: Mapping[str, int]
    base: tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """One tensor's dimensions."""

    text: str
    nodes: tuple[_Node, ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> Axes:
        """Raise OptionError for what is no such text, and for an axis that is there twice where it may not
        be."""
        tokens = _tokens(text)
        parser = _Parser(text, tokens)
        nodes = tuple(parser.factors())
        if parser.at < len(tokens):
            raise OptionError(f"{text!r}: unexpected {tokens[parser.at]!r}")
        if _count(_Product(nodes)) > _MAX_TERMS:
            raise OptionError(f"{text[:100]!r}... has more than {_MAX_TERMS} parts")
        found = cls(text, nodes)
        if any(len(set(names)) < len(names) for names in found.ways):
            raise OptionError(f"{text!r} has an axis twice")
        return found

    @cached_property
    def ways(self) -> list[tuple[str, ...]]:
        """The axes of each way through the sums, as of `terms`."""
        return _alternatives(_Product(self.nodes))

    @property
    def names(self) -> list[str]:
        """The names of all axes, each once."""
        return list(dict.fromkeys(name for node in self.nodes for name in _names(node)))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return extents, if all axes are known. KeyError for one that is not."""
        return tuple(_size(node, sizes) for node in self.nodes)

    def solve(self, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return ``sizes`` with those that follow from ``shape``. PlanError where they do not fit
        together, or where a dimension has several axes of unknown size."""
        if len(shape) != len(self.nodes):
            raise PlanError(f"it has {len(shape)} dimensions, and {self.text!r} {len(self.nodes)}")
        known = dict(sizes)
        left = list(zip(self.nodes, shape, strict=True))
        while left:  # what one dimension tells may be what another one needs
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
                    raise PlanError(f"{name} = {known[name]} in {self.text!r} is negative")
            if _size(node, known) != extent:
                shown = ", ".join(f"{name} = {known[name]}" for name in dict.fromkeys(_names(node)))
                raise PlanError(
                    f"a dimension is {extent} where {self.text!r} has {_size(node, known)} ({shown})"
                )
        return known

    def _solve(self, node: _Node, extent: int, known: Mapping[str, int], name: str) -> int:
        base = _size(node, {**known, name: 0})
        slope = _size(node, {**known, name: 1}) - base
        value, rest = divmod(extent - base, slope) if slope else (0, 1)
        if rest or value < 0:
            raise PlanError(f"a dimension is {extent}, which no {name} makes of {self.text!r}")
        return value

    def terms(self, sizes: Mapping[str, int]) -> list[AxisPlaces]:
        """Return one for each way through the sums: together they are all elements, each once."""
        by_dim = [list(_expand(node, 1, sizes)) for node in self.nodes]
        return [
            AxisPlaces(
                {name: dim for dim, (steps, _) in enumerate(dims) for name in steps},
                {name: step for steps, _ in dims for name, step in steps.items()},
                tuple(offset for _, offset in dims),
            )
            for dims in product(*by_dim)
        ]


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise OptionError(f"{text!r}: {text[at:].split()[0]!r} is no axis")
        tokens.append(found[1])
        at = found.end()
    return tokens


class _Parser:
    def __init__(self, text: str, tokens: Sequence[str]) -> None:
        self._text, self._tokens = text, tokens
        self.at = 0

    def factors(self, depth: int = 0) -> Iterator[_Node]:
        """Yield axes and parentheses up to ``)``, ``+`` or the end."""
        if depth > _MAX_NESTING:
            raise OptionError(f"{self._text!r} is nested too deep")
        while self.at < len(self._tokens) and self._tokens[self.at] not in (")", "+"):
            token = self._tokens[self.at]
            self.at += 1
            yield self._sum(depth + 1) if token == "(" else token

    def _sum(self, depth: int) -> _Node:
        parts = [self._product(depth)]
        while self._next() == "+":
            parts.append(self._product(depth))
        if self._tokens[self.at - 1] != ")":
            raise OptionError(f"{self._text!r}: a parenthesis is not closed")
        return parts[0] if len(parts) == 1 else _Sum(tuple(parts))

    def _product(self, depth: int) -> _Node:
        factors = tuple(self.factors(depth))
        if not factors:
            raise OptionError(f"{self._text!r}: nothing in parentheses, or beside +")
        return factors[0] if len(factors) == 1 else _Product(factors)

    def _next(self) -> str:
        if self.at >= len(self._tokens):
            raise OptionError(f"{self._text!r}: a parenthesis is not closed")
        self.at += 1
        return self._tokens[self.at - 1]


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
    """Yield (step by axis, offset) of each way through the sums, along one dimension."""
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
