"""What a tensor is of, as its name tells: which layer, or an optimizer; for jobs, pages and pictures."""

from __future__ import annotations

import re
from typing import Any, Final

from dcp.server.catalog.values import clean_text

__all__ = ["in_order", "is_of_optimizer", "layer_number", "layer_of"]

_NUMBERED: Final = re.compile(r"(.*?(?:^|[._])[0-9]+)\.", re.DOTALL)
_OF_OPTIMIZER: Final = re.compile(r"(?:.*_)?optim(?:i[sz]er)?s?(?:_.*|[0-9]+)?", re.DOTALL | re.IGNORECASE)
_NUMBER: Final = re.compile(r"(?:^|[._])([0-9]{1,9})$")


def layer_of(fqn: str) -> str:
    """A name to its first number that stands by itself and has something below it, as of a block of a model
    (``layers.3`` or ``layers_3``); without one, to its last dot."""
    numbered = _NUMBERED.match(fqn)
    return clean_text(numbered[1] if numbered else fqn.rpartition(".")[0] or fqn)


def is_of_optimizer(fqn: str) -> bool:
    """Whether its first or second name is that of an optimizer: ``optimizer.state.0``, ``app.optim.w``."""
    return any(_OF_OPTIMIZER.fullmatch(name) for name in fqn.split(".", 2)[:2])


def layer_number(fqn: str) -> int | None:
    """The number at the end of its layer; None if it has none."""
    found = _NUMBER.search(layer_of(fqn))
    return None if found is None else int(found[1])


def in_order(name: str) -> list[Any]:
    """As people count: layers.2 before layers.10."""
    parts = re.split(r"([0-9]+)", name)
    return [_counted(part) if place % 2 else part for place, part in enumerate(parts)]


def _counted(digits: str) -> tuple[int, str]:
    digits = digits.lstrip("0")
    return len(digits), digits  # as numbers are ordered; int refuses thousands of digits
