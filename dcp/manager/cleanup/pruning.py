"""Which checkpoints parts are to be dropped from: one by name, or those of a run by rules. Torch-free."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final

from dcp.manager.cleanup.retention import Part, Retention, plan
from dcp.steps.folders import StepFolders
from dcp.storage.errors import CheckpointNotFoundError, OptionError
from dcp.storage.formats.opening.folder import has_checkpoint
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import Store
from dcp.storage.stores.folders import ParentFolder, open_parent_folder

__all__ = ["steps_of", "to_prune"]

_NAME: Final = re.compile(r"(?P<before>.*?)(?P<step>[0-9]{1,18})")


def to_prune(
    uri: str, retention: Retention, *, open_store: OpenStore = open_store
) -> list[tuple[Store, tuple[Part, ...]]]:
    """What is to be dropped at ``uri``, oldest step first: of a checkpoint its parts, of a run those that
    ``retention`` does not keep. Nothing is changed.

    Raises OptionError for a run without rules, `CheckpointNotFoundError` where there is neither.
    """
    store = open_store(uri)
    if has_checkpoint(store):
        return [(store, retention.dropping)]
    root = open_parent_folder(uri, open_store=open_store)
    folders = steps_of(root)
    states = folders.survey()
    if not states:
        raise CheckpointNotFoundError(
            f"{store.url} is no checkpoint, and has none in folders that are called by their steps",
            path=store.url,
        )
    planned = plan(retention, states, time.time())
    return [(folders.store(step), parts) for step, parts in planned.drop.items()]


def steps_of(root: ParentFolder) -> StepFolders:
    """The steps of a run that anybody named: as most of its folders are called, before their number.

    Raises OptionError where two ways to name them are as frequent.
    """
    found: dict[str, list[str]] = {}
    for name in root.look():
        match = _NAME.fullmatch(name)
        if match is not None:
            found.setdefault(match["before"], []).append(match["step"])
    counts = sorted(((len(steps), before) for before, steps in found.items()), reverse=True)
    if len(counts) > 1 and counts[0][0] == counts[1][0]:
        names = ", ".join(f"{before}..." for _, before in counts)
        raise OptionError(f"{root.url} has several runs, {names}: name the checkpoints themselves")
    before = counts[0][1] if counts else "step-"
    width = _width(found.get(before, ()))
    return StepFolders(root, lambda step: f"{before}{step:0{width}d}")


def _width(steps: Sequence[str]) -> int:
    """Digits that all steps are filled up to; 1 where they are not."""
    widths = {len(step) for step in steps}
    return widths.pop() if len(widths) == 1 else 1
