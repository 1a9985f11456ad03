"""Marks of tensors whose values are dead or exploding, by rules that pages state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

LARGE: Final = 10_000.0
"""A magnitude that weights and their moments do not have where training goes well."""

Values = Mapping[str, Any]
"""Statistics of a tensor as the API has them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``kind`` and why."""

    kind: Literal["exploding", "dead"]
    reason: str


def mark_of(dtype: str, values: Values | None, second_moment: Values | None = None) -> Mark | None:
    """Return the mark of a tensor of floats with more than one element: exploding with NaN or infinite
    elements, or one above `LARGE`; dead if all of it is 0, or its ``second_moment``, which is then what no
    gradient has reached."""
    if values is None or "float" not in dtype or values["count"] < 2:
        return None
    wrong = [
        f"{values[name]:,} {word}" for name, word in (("nans", "NaN"), ("infs", "infinite")) if values[name]
    ]
    if wrong:
        return Mark("exploding", " and ".join(wrong))
    largest = largest_of(values)
    if largest is not None and largest > LARGE:
        return Mark("exploding", f"the largest is {largest:.3g}")
    if values["zeros"] == values["count"]:
        return Mark("dead", "all of it is 0")
    if second_moment is not None and second_moment["zeros"] == second_moment["count"] > 1:
        return Mark("dead", "its second moment is 0: no gradient has reached it")
    return None


def largest_of(values: Values) -> float | None:
    """Return the largest magnitude of the finite elements; infinite where JSON could not hold it."""
    if not values["count"] or values["nans"] + values["infs"] == values["count"]:
        return None
    ends = [values["min"], values["max"]]
    return math.inf if None in ends else float(max(map(abs, ends)))


def norm_of(values: Values) -> float | None:
    """Return the norm of all elements: NaN or infinite where one of them is."""
    return math.nan if values["nans"] else math.inf if values["infs"] else values["norm"]


def rms_of(values: Values) -> float | None:
    """Return the root mean square of the finite elements."""
    finite = values["count"] - values["nans"] - values["infs"]
    return values["norm"] / math.sqrt(finite) if finite and values["norm"] is not None else None
