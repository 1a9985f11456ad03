"""The tensors of a checkpoint by modules: a tree with sums, for whoever shows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp.inspection.checkpoints import TensorRow

__all__ = ["ModuleNode", "module_tree"]


@dataclass(slots=True)
class ModuleNode:
    """A module: what is below one dotted prefix. ``tensor`` is set where the name itself is a tensor."""

    name: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    tensor: TensorRow | None = None
    children: dict[str, ModuleNode] = field(default_factory=dict)


def module_tree(rows: Iterable[TensorRow]) -> ModuleNode:
    """Tensors grouped by the dots in their names, with sums; the root has an empty name."""
    root = ModuleNode("")
    for row in rows:
        elements = 1
        for size in row.shape:
            elements *= size
        node = root
        _count(node, elements, row.bytes)
        for part in row.fqn.split("."):
            node = node.children.setdefault(part, ModuleNode(part))
            _count(node, elements, row.bytes)
        node.tensor = row
    return root


def _count(node: ModuleNode, elements: int, size_bytes: int) -> None:
    node.tensors += 1
    node.elements += elements
    node.bytes += size_bytes
