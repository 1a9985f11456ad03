"""The runs below a folder: folders that have checkpoints directly in them, found by names and listings alone.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dcp.calls.plain_errors import plain_errors
from dcp.inspection.checkpoints import CheckpointSummary, list_checkpoints, name_and_step
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.opening.sources import locate
from dcp.storage.stores.folders import ParentFolder, SmallFiles, open_parent_folder
from dcp.storage.stores.opening import OpenWith

__all__ = ["list_below", "list_runs"]

_DEEPEST = 4
"""Folders below folders that are looked into for runs."""


@plain_errors
def list_runs(
    checkpoint_id: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointSummary]:
    """The runs below a folder, however deep within four levels, by name; not the folder itself.

    Their ``state`` is "run" and their ``name`` relative to the folder; ``checkpoints`` is the number of those
    committed directly in them, ``committed_seconds`` the time of the last commit, and ``step`` that of the
    last commit whose name has one. What cannot be listed, and folders whose names begin with a dot, are
    passed over.

    Args:
        checkpoint_id: The path or URL of the folder.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        A line a run.

    Raises:
        CheckpointNotFoundError: There is no such folder.
        StorageError: The storage cannot be listed.
    """
    opener = OpenWith(storage_options)
    if locate(checkpoint_id, open_store=opener).file is not None:
        return []
    root = open_parent_folder(checkpoint_id, open_store=opener)
    return [
        _summary(name, run, committed) for name, run, committed in _below(root, opener, "", 1) if committed
    ]


@plain_errors
def list_below(
    checkpoint_id: str | os.PathLike[str],
    *,
    quick: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[CheckpointSummary]:
    """The checkpoints of a folder and of all folders below it, within four levels, as `list_checkpoints` has
    those of one; their names are relative to the folder.

    Args:
        checkpoint_id: The path or URL of the folder.
        quick: As for `list_checkpoints`.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        A line a checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such folder.
        StorageError: The storage cannot be listed.
    """
    opener = OpenWith(storage_options)
    found = list_checkpoints(checkpoint_id, quick=quick, storage_options=storage_options)
    if locate(checkpoint_id, open_store=opener).file is not None:
        return found
    for name, run, _ in _below(open_parent_folder(checkpoint_id, open_store=opener), opener, "", 1):
        in_it = list_checkpoints(run.url, quick=quick, storage_options=storage_options)
        found += [replace(row, name=f"{name}/{row.name}") for row in in_it if row.url != run.url]
    return found


def _below(
    root: ParentFolder,
    opener: OpenWith,
    prefix: str,
    depth: int,
    looked: Mapping[str, SmallFiles] | None = None,
) -> Iterator[tuple[str, ParentFolder, dict[str, SmallFiles]]]:
    """The folders below that are no checkpoints, each with the committed ones directly in it."""
    looked = root.look() if looked is None else looked
    for name in root.names():
        if name.startswith(".") or _is_committed(looked.get(name, {})):
            continue
        run = open_parent_folder(f"{root.url.rstrip('/')}/{name}", open_store=opener)
        try:
            in_run = run.look()
        except CheckpointError:
            continue
        yield prefix + name, run, {name: files for name, files in in_run.items() if _is_committed(files)}
        if depth < _DEEPEST:
            yield from _below(run, opener, f"{prefix}{name}/", depth + 1, in_run)


def _is_committed(files: SmallFiles) -> bool:
    return any(map(is_commit_object, files))


def _summary(name: str, run: ParentFolder, committed: Mapping[str, SmallFiles]) -> CheckpointSummary:
    times = {
        folder: max(info.modified_seconds for file, info in files.items() if is_commit_object(file))
        for folder, files in committed.items()
    }
    steps = {folder: step for folder in times if (step := name_and_step(folder)[1]) is not None}
    newest = max(steps, key=lambda folder: (times[folder], folder), default=None)
    step = None if newest is None else steps[newest]
    return CheckpointSummary(name, run.url, "run", step, max(times.values()), checkpoints=len(committed))
