"""What a checkpoint consists of, by the first names of its tensors: a model, its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dcp.server.catalog.names import is_of_optimizer
from dcp.server.core.data.access import DataAccess
from dcp.server.core.http.dependencies import Db, PageParams
from dcp.server.core.security.principal import Principal
from dcp.server.features.tensors import api as tensors_api

__all__ = ["TreePart", "parts_of"]

_PARTS: Final = 12
_LONG_NAME: Final = 80
"""Longer ones are nobody's name for a model or an optimizer, and no globs."""


@dataclass(frozen=True, slots=True)
class TreePart:
    """All that is below ``name``, tensors of ``bytes``."""

    name: str
    tensors: int
    bytes: int

    @property
    def is_optimizer(self) -> bool:
        """As its name tells."""
        return is_of_optimizer(self.name)


def parts_of(checkpoint_id: int, database: Db, data: DataAccess, caller: Principal) -> list[TreePart]:
    """What is at the top of its tree; where an optimizer is one name further down, as in a state that holds
    both, what is beside it. Nothing where there is more than a handful."""
    found = _below("", checkpoint_id, database, data, caller)
    if any(one.is_optimizer for one in found):
        return found
    parts: list[TreePart] = []
    for one in found:
        inner = _below(one.name, checkpoint_id, database, data, caller)
        parts += inner if any(each.is_optimizer for each in inner) else [one]
    return parts


def _below(
    prefix: str, checkpoint_id: int, database: Db, data: DataAccess, caller: Principal
) -> list[TreePart]:
    page = PageParams(_PARTS + 1, None)
    nodes = tensors_api.tensor_tree(checkpoint_id, database, data, caller, page, prefix).items
    start = f"{prefix}." if prefix else ""
    return [
        TreePart(f"{start}{one.name}", one.tensors, one.bytes)
        for one in (nodes if len(nodes) <= _PARTS else ())
        if one.tensors and one.entry is None and len(one.name) < _LONG_NAME
    ]
