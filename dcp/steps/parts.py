"""Parts of a state, by the names of their entries: what goes into files of its own, and may be dropped."""

from __future__ import annotations

from typing import Final

__all__ = ["OPTIMIZER", "patterns_of_part"]

OPTIMIZER: Final = ("optim*.state.*", "*.optim*.state.*", "optim*.param_groups*", "*.optim*.param_groups*")
"""Names of what an optimizer keeps, as trainers call it: what is below ``state`` and ``param_groups`` under a
key that begins with ``optim``. A weight that is called so has neither above it."""


def patterns_of_part(name: str) -> tuple[str, ...]:
    """Globs on the names of its entries; ``name`` is "optimizer", or such a glob itself."""
    return OPTIMIZER if name == "optimizer" else (name,)
