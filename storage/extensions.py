"""Extensions of other packages, declared as entry points.

A package declares extensions in its `pyproject.toml`::

    [project.entry-points."dcphub.formats"]
    npy = "my_package.npy_folder:FORMAT"

The metadata of the environment are read once, on first use.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from dcp.storage.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def _entry_points(group: str) -> dict[str, list[EntryPoint]]:
    from importlib.metadata import entry_points  # slow: imported on first use

    by_name: dict[str, list[EntryPoint]] = {}
    for found in entry_points(group=group):
        by_name.setdefault(found.name, []).append(found)
    return by_name


def extension_names(group: str) -> list[str]:
    """Return the sorted names of the entry points of ``group`` without loading any."""
    return sorted(_entry_points(group))


def loaded_extension(group: str, name: str) -> Any:
    """Load the entry point ``name`` of ``group``; None if absent.

    Raises:
        UnsupportedFormatError: If the import fails, or several packages declare the name with different
            objects.
    """
    same_name = _entry_points(group).get(name)
    if same_name is None:
        return None
    packages = " and ".join(sorted({found.dist.name for found in same_name if found.dist is not None}))
    what = f"the entry point {name} of the group {group} ({same_name[0].value}, of the package {packages})"
    if len({found.value for found in same_name}) > 1:
        raise UnsupportedFormatError(f"{what} is declared more than once: uninstall all but one")
    try:
        return same_name[0].load()
    except (Exception, SystemExit) as error:  # raised by the module of another package
        raise UnsupportedFormatError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}. Fix or uninstall the package"
        ) from error
