"""Hints for a place that has no checkpoint: what lies near it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dcp.storage.errors import CheckpointError, CheckpointNotFoundError
from dcp.storage.formats.opening.folder import has_checkpoint
from dcp.storage.formats.registry import file_suffixes
from dcp.storage.near_names import close_to, listed
from dcp.storage.stores import OpenStore
from dcp.storage.stores.opening import ParentFolder, open_parent_folder
from dcp.storage.stores.posix.files import broken_link

__all__ = ["naming_near_places", "with_near_places"]

_LOOKED_AT: Final = 200
"""Folders that are looked into for checkpoints."""

_REQUESTS: Final = 4
"""The same, where each is a request or two."""

_SHOWN: Final = 4
_FOLDER: Final = re.compile(r"[^:]+://[^/]+/?[^/]")
"""What is not the scheme alone."""


@contextmanager
def naming_near_places(checkpoint_id: str | os.PathLike[str], open_store: OpenStore) -> Iterator[None]:
    """Yield a CheckpointNotFoundError of this block says as well which checkpoints lie below
    ``checkpoint_id`` or, if that is not there, what is beside it."""
    try:
        yield
    except CheckpointNotFoundError as error:
        raise with_near_places(error, checkpoint_id, open_store) from None


def with_near_places(
    error: CheckpointNotFoundError, checkpoint_id: str | os.PathLike[str], open_store: OpenStore
) -> CheckpointNotFoundError:
    """Return the same error, which says as well what `naming_near_places` says."""
    try:
        text = _hint(str(error).removesuffix(" Check the path."), checkpoint_id, open_store)
    except (CheckpointError, OSError):  # the error that is on its way matters more
        text = ""
    return CheckpointNotFoundError(text, **error.facts) if text else error


def _hint(message: str, checkpoint_id: str | os.PathLike[str], open_store: OpenStore) -> str:
    """Return ``message`` and the hint; "" without a hint."""
    root = open_parent_folder(checkpoint_id, open_store=open_store)
    path = root.local_path
    if path is not None and broken_link(path):
        return ""  # which the message says
    if path is not None and not os.path.lexists(path):
        return f"{root.url} holds no checkpoint: {_beside_missing(path)}"
    names = sorted(root.names(), key=_by_number, reverse=True)
    if names:
        return f"{message}\n{_below(root, names)}"
    if root.lists_tree:
        beside = _beside_prefix(root.url, open_store)
        return beside and f"{message}\n{beside}"
    files = sorted(info.name for info in open_store(checkpoint_id).list() if _is_weights(info.name))
    return f"{message}\nFiles in it: {_some(files)}." if files else ""


def _below(root: ParentFolder, names: Sequence[str]) -> str:
    looked_at = _REQUESTS if root.lists_tree else _LOOKED_AT
    found = [name for name in names[:looked_at] if has_checkpoint(root.store(name))]
    if not found:
        return f"Folders below it: {_some(names)}; dcp ls finds the checkpoints in them."
    rest = names[len(found) :] if found == list(names[:looked_at]) else []
    return f"Checkpoints below it: {_some([*found, *rest])}."


def _beside_missing(path: Path) -> str:
    """Return what is where ``path`` would be, or the last folder on the way there that exists."""
    what = "it"
    while not path.parent.is_dir():
        path = path.parent
        what = str(path)
    with os.scandir(path.parent) as entries:
        names = sorted((entry.name for entry in entries if not entry.name.startswith(".")), key=_by_number)
    close = close_to(path.name, names) or names[::-1]
    there = f"\n{path.parent} has {_some(close)}." if close else ""
    return f"{what} does not exist.{there}"


def _beside_prefix(url: str, open_store: OpenStore) -> str:
    parent, _, name = url.rpartition("/")
    names = open_parent_folder(parent, open_store=open_store).names() if _FOLDER.match(parent) else []
    close = close_to(name, names) or sorted(names, key=_by_number, reverse=True)
    return f"{parent} has {_some(close)}." if close else ""


def _some(names: Sequence[str]) -> str:
    return listed(names, most=_SHOWN, show=str)


def _is_weights(name: str) -> bool:
    return name.lower().endswith(file_suffixes()) and not name.startswith(".")


def _by_number(name: str) -> list[tuple[int, str]]:
    """So that step-2 comes before step-10."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"([0-9]+)", name)]
