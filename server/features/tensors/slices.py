"""Slices as text: what a query can say of a tensor."""

from __future__ import annotations

import re
from types import EllipsisType
from typing import TYPE_CHECKING, Final, Literal

from dcp.server.core.problems import UnprocessableError

if TYPE_CHECKING:
    from dcp.inspection.values.tensor_reading import Slices

__all__ = ["TensorFormat", "parse_slices"]

TensorFormat = Literal["npy", "safetensors"]

_MAX_SLICES: Final = 64
_PART: Final = re.compile(
    r"(?P<start>-?[0-9]{1,18})?(?:(?P<is_slice>:)(?P<stop>-?[0-9]{1,18})?(?::(?P<step>-?[0-9]{1,18})?)?)?"
)


def parse_slices(text: str | None) -> Slices | None:
    """``0:2,:,3`` as numpy would take it; None for none. UnprocessableError for anything else."""
    if text is None or not text.strip():
        return None
    parts: list[slice | int | EllipsisType] = []
    for part in text.split(",", _MAX_SLICES):
        stripped = part.strip()
        match = _PART.fullmatch(stripped)
        if stripped == "...":
            parts.append(...)
        elif match is None or not stripped or (match["step"] and int(match["step"]) == 0):
            raise UnprocessableError(
                f"{part[:40]!r} in the slice is none of 3, 0:2, ::-1 and ...", field="slice"
            )
        elif match["is_slice"]:
            numbers = (match["start"], match["stop"], match["step"])
            parts.append(slice(*(int(number) if number else None for number in numbers)))
        else:
            parts.append(int(match["start"]))
    return tuple(parts)
