"""With which weights checkpoints are added: given, by a formula, or of averages over the steps of a run."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from dcp.conversion.contents.casting import check_castable
from dcp.storage.errors import OptionError

__all__ = [
    "MAX_SOURCES",
    "Arithmetic",
    "average_weights",
    "formula_weights",
    "source_names",
    "weights_of_adapters",
    "weights_of_sources",
]

MAX_SOURCES: Final = 1_000
_MAX_FORMULA: Final = 1_000
_MAX_TOLD: Final = 200
_SUMS: Final = ("float32", "float64")

_Linear = dict[str, Fraction]
"""Factors by name of a source; those of what is a mere number are under ""."""


@dataclass(frozen=True)
class Arithmetic:
    """What a merge computes: the sum of its sources, each times its one of ``weights``, and of what adapters
    add, times ``adapter_weights``; added in the type ``accumulate``, in this order.

    OptionError for weights that are no numbers, and for other types than float32 and float64.
    """

    weights: tuple[float, ...]
    adapter_weights: tuple[float, ...] = ()
    accumulate: str = "float32"

    def __post_init__(self) -> None:
        count = len(self.weights) + len(self.adapter_weights)
        if not self.weights or count > MAX_SOURCES:
            raise OptionError(f"a merge is of 1 to {MAX_SOURCES} checkpoints, not of {count}")
        for weight in (*self.weights, *self.adapter_weights):
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not abs(weight) < math.inf:
                raise OptionError(f"weights must be finite numbers, not {weight!r}")
            if abs(weight) > sys.float_info.max:
                raise OptionError("weights must be finite numbers, not too large for float64")
        if self.accumulate not in _SUMS:
            raise OptionError(f"accumulate must be one of {', '.join(_SUMS)}, not {self.accumulate!r}")

    @property
    def code(self) -> int:
        """Of the type in which is added."""
        return check_castable(self.accumulate)


def weights_of_sources(
    count: int, weights: Sequence[float] | None, formula: str | None, decay: float | None = None
) -> tuple[float, ...]:
    """Of ``count`` sources, in their order: those given, a formula's, or of an average. OptionError for
    another number of weights, and for more than one of these."""
    if sum(one is not None for one in (weights, formula, decay)) > 1:
        raise OptionError("weights, formula and decay: give one of them")
    if not count:
        raise OptionError("sources: there is none")
    if formula is not None:
        return formula_weights(formula, source_names(count))
    if weights is None:
        return average_weights(count, decay)
    if len(weights) != count:
        raise OptionError(f"{len(weights)} weights are given for {count} sources")
    return tuple(weights)


def weights_of_adapters(count: int, weights: Sequence[float] | None) -> tuple[float, ...]:
    """Of ``count`` adapters; by default 1. OptionError for another number of weights."""
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise OptionError(f"{len(weights)} weights are given for {count} adapters")
    return tuple(weights)


def average_weights(count: int, decay: float | None) -> tuple[float, ...]:
    """Of an average of ``count`` checkpoints, the newest first; they add up to 1.

    With ``decay`` an exponential moving average, that of number k is ``(1 - decay) * decay**k / (1 -
    decay**count)``; else all are the same.
    """
    if count < 1:
        raise OptionError(f"an average is of 1 checkpoint or more, not of {count}")
    if decay is None:
        return (1.0 / count,) * count
    if not isinstance(decay, int | float) or not 0.0 < decay < 1.0:
        raise OptionError(f"decay must be between 0 and 1, not {decay!r}")
    factors = [decay**number for number in range(count)]
    total = math.fsum(factors)
    return tuple(factor / total for factor in factors)


def source_names(count: int) -> list[str]:
    """What a formula calls sources: A to Z, then A1 to Z1 and so on."""
    return [chr(ord("A") + number % 26) + str(number // 26 or "") for number in range(count)]


def formula_weights(formula: str, names: Sequence[str]) -> tuple[float, ...]:
    """The weights that a formula such as ``A + 0.4 * (B - C)`` gives to the sources of these ``names``.

    It may have ``+ - * /``, parentheses, numbers and names, of which no two may be multiplied. What it comes
    to is computed exactly, and rounded once. OptionError for any other, for names of no source, and for
    sources that it does not name.
    """
    try:
        if not isinstance(formula, str) or len(formula) > _MAX_FORMULA:
            raise ValueError
        tree = ast.parse(formula.strip(), mode="eval").body
        found = _linear(tree)
        weights = {name: float(factor) for name, factor in found.items()}
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError, ZeroDivisionError) as error:
        raise OptionError(
            f"formula: {str(formula)[:_MAX_TOLD]!r} is no sum of sources times numbers, "
            "such as A + 0.4*(B - C)"
        ) from error
    _check_names(found, names)
    return tuple(weights[name] for name in names)


def _check_names(found: Mapping[str, Fraction], names: Sequence[str]) -> None:
    if found.get("", 0):
        raise OptionError("formula: a number alone is added, which is no checkpoint")
    strange = sorted(found.keys() - {*names, ""})
    if strange:
        raise OptionError(f"formula: {', '.join(strange)}: there are the sources {', '.join(names)} only")
    unused = [name for name in names if name not in found]
    if unused:
        raise OptionError(f"formula: {', '.join(unused)} is not in it; leave out what is not needed")


def _linear(node: ast.expr) -> _Linear:
    """ValueError for what is not linear."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return {"": _exactly(number)}
        case ast.Name(id=name):
            return {name: Fraction(1)}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _times(_linear(operand), Fraction(-1))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _linear(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _combined(_linear(left), op, _linear(right))
    raise ValueError


def _exactly(number: float) -> Fraction:
    """As it is written: 0.4 are two fifths."""
    return Fraction(repr(float(number)))


def _combined(left: _Linear, op: ast.operator, right: _Linear) -> _Linear:
    match op:
        case ast.Add():
            return _added(left, right)
        case ast.Sub():
            return _added(left, _times(right, Fraction(-1)))
        case ast.Mult() if left.keys() <= {""}:
            return _times(right, left[""])
        case ast.Mult() if right.keys() <= {""}:
            return _times(left, right[""])
        case ast.Div() if right.keys() <= {""}:
            return _times(left, 1 / right[""])
    raise ValueError


def _added(left: _Linear, right: _Linear) -> _Linear:
    return {name: left.get(name, Fraction(0)) + right.get(name, Fraction(0)) for name in {**left, **right}}


def _times(linear: _Linear, factor: Any) -> _Linear:
    return {name: own * factor for name, own in linear.items()}
