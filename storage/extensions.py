"""What other packages add to ours, found in the metadata of what is installed: entry points.

A package declares them in its `pyproject.toml`::

    [project.entry-points."dcphub.formats"]
    npy = "my_package.npy_folder:FORMAT"

Reading the metadata of an environment takes some ten milliseconds, so it is read when it is needed, and once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from dcp.storage.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["extension_names", "loaded_extension"]


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # only here: it takes longer than to import all of ours

    return {found.name: found for found in entry_points(group=group)}


def extension_names(group: str) -> list[str]:
    """Names of the entry points of ``group``, sorted; none is loaded."""
    return sorted(_entry_points(group))


def loaded_extension(group: str, name: str) -> Any:
    """What the entry point ``name`` of ``group`` is; None if there is none.

    UnsupportedFormatError, which names it, if it cannot be imported.
    """
    found = _entry_points(group).get(name)
    if found is None:
        return None
    try:
        return found.load()
    except Exception as error:
        raise UnsupportedFormatError(
            f"the entry point {name} of the group {group} ({found.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
