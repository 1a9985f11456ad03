"""Weights of merged checkpoints: given as numbers, by a formula, or by an average over the steps of a run."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any, Final, SupportsFloat

from dcp.storage.errors import OptionError
from dcp.storage.formats.dtypes import check_castable
from dcp.storage.near_names import listed

MAX_SOURCES: Final = 1_000
_MAX_FORMULA: Final = 1_000
_MAX_TOLD: Final = 200
_MAX_LISTED: Final = 10
_SUMS: Final = ("float32", "float64")

Weight = SupportsFloat
"""A finite number of Python, `fractions` or numpy, or a tensor without dimensions; bool is excluded."""

_Linear = dict[str, Fraction]
"""Factors by source name; constants are under ""."""


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of a merge: weighted sum of sources, then of adapters, in the type ``accumulate``.

    Raises OptionError for too many terms, and for types except float32 and float64.
    """

    weights: tuple[float, ...]
    adapter_weights: tuple[float, ...] = ()
    accumulate: str = "float32"

    def __post_init__(self) -> None:
        count = len(self.weights) + len(self.adapter_weights)
        if not self.weights or count > MAX_SOURCES:
            raise OptionError(f"sources: a merge takes 1 to {MAX_SOURCES} checkpoints, not {count}")
        if self.accumulate not in _SUMS:
            raise OptionError(f"accumulate must be one of {', '.join(_SUMS)}, not {self.accumulate!r}")

    @property
    def code(self) -> int:
        """Code of the accumulation type."""
        return check_castable(self.accumulate)


def weights_of_sources(
    count: int, weights: Sequence[Weight] | None, formula: str | None, decay: Weight | None = None
) -> tuple[float, ...]:
    """Return the weights of ``count`` sources: given, from a formula, or of an average.

    Raises OptionError for a wrong count, invalid numbers and conflicting options.
    """
    if sum(one is not None for one in (weights, formula, decay)) > 1:
        raise OptionError("weights, formula and decay exclude each other: pass one of them")
    if not count:
        raise OptionError("sources: pass at least one checkpoint")
    if formula is not None:
        return formula_weights(formula, source_names(count))
    if weights is None:
        return average_weights(count, decay)
    return _numbers("weights", weights, count, "sources")


def weights_of_adapters(count: int, weights: Sequence[Weight] | None) -> tuple[float, ...]:
    """Return the weights of ``count`` adapters, default 1. Raises OptionError as `weights_of_sources`."""
    if weights is None:
        return (1.0,) * count
    return _numbers("adapter_weights", weights, count, "adapters")


def _numbers(what: str, given: Sequence[Weight], count: int, of: str) -> tuple[float, ...]:
    """Convert numbers, or raise OptionError with all invalid ones."""
    if isinstance(given, str | bytes) or not hasattr(given, "__len__"):
        raise OptionError(f"{what} must be a list of numbers, not {given!r}")
    if len(given) != count:
        raise OptionError(f"{what}: got {len(given)} numbers for {count} {of}; pass one for each")
    found = [_number(weight) for weight in given]
    wrong = [
        f"number {at} is {repr(given[at - 1])[:_MAX_TOLD]}" for at, one in enumerate(found, 1) if one is None
    ]
    if wrong:
        shown = listed(wrong, most=_MAX_LISTED, show=str)
        raise OptionError(f"{what}: {shown}; they must be finite numbers, also as float64")
    return tuple(one for one in found if one is not None)


def _number(given: Any) -> float | None:
    """Return the nearest float64, or None if not a finite number."""
    if getattr(given, "shape", None) == () and callable(getattr(given, "item", None)):
        given = given.item()  # a numpy scalar, or a tensor without dimensions
    if not isinstance(given, Real) or isinstance(given, bool):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def average_weights(count: int, decay: Weight | None) -> tuple[float, ...]:
    """Return the weights of an average of ``count`` checkpoints, the newest first, with sum 1.

    ``decay`` selects an exponential moving average: weight k is ``(1 - decay) * decay**k / (1 -
    decay**count)``. Default: equal weights.
    """
    if count < 1:
        raise OptionError(f"an average needs at least 1 checkpoint, not {count}")
    if decay is None:
        return (1.0 / count,) * count
    base = _number(decay)
    if base is None or not 0.0 < base < 1.0:
        raise OptionError(f"decay must be between 0 and 1, not {decay!r}")
    factors = [base**number for number in range(count)]
    total = math.fsum(factors)
    return tuple(factor / total for factor in factors)


def source_names(count: int) -> list[str]:
    """Return formula names of sources: A to Z, then A1 to Z1, and further."""
    return [chr(ord("A") + number % 26) + str(number // 26 or "") for number in range(count)]


def formula_weights(formula: str, names: Sequence[str]) -> tuple[float, ...]:
    """Return the weights that a formula such as ``A + 0.4 * (B - C)`` gives to the sources ``names``.

    A formula consists of ``+ - * /``, parentheses, numbers and names; products of two names are not allowed.
    Evaluation is exact, with one rounding at the end. Raises OptionError for other expressions, unknown names
    and unused sources.
    """
    try:
        if not isinstance(formula, str) or len(formula) > _MAX_FORMULA:
            raise ValueError
        tree = ast.parse(formula.strip(), mode="eval").body
        found = _linear(tree)
        weights = {name: float(factor) for name, factor in found.items()}
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError, ZeroDivisionError) as error:
        raise OptionError(
            f"formula: {str(formula)[:_MAX_TOLD]!r} is not a weighted sum of sources such as A + 0.4*(B - C)"
        ) from error
    if found.get("", 0):
        raise OptionError("formula: a term is a number without a source; write number * source")
    strange = sorted(found.keys() - {*names, ""})
    if strange:
        raise OptionError(f"formula: unknown sources {', '.join(strange)}; sources are {', '.join(names)}")
    unused = [name for name in names if name not in found]
    if unused:
        raise OptionError(f"formula: unused sources {', '.join(unused)}; remove these sources")
    return tuple(weights[name] for name in names)


def _linear(node: ast.expr) -> _Linear:
    """Return the factors of an expression. ValueError if not linear."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return {"": Fraction(repr(float(number)))}  # exact decimal value: 0.4 is 2/5
        case ast.Name(id=name):
            return {name: Fraction(1)}
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
            return _added({}, _linear(operand), -1 if isinstance(op, ast.USub) else 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return _added(_linear(left), _linear(right), -1 if isinstance(op, ast.Sub) else 1)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
            one, other = _linear(left), _linear(right)
            if isinstance(op, ast.Mult) and one.keys() == {""}:
                one, other = other, one
            if other.keys() == {""}:
                return _added({}, one, 1 / other[""] if isinstance(op, ast.Div) else other[""])
    raise ValueError


def _added(left: _Linear, right: _Linear, factor: Fraction | int) -> _Linear:
    """Return the factors of ``left`` plus ``factor`` times ``right``."""
    none = Fraction(0)
    return {name: left.get(name, none) + factor * right.get(name, none) for name in {**left, **right}}
