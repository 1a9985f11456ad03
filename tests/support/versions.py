"""State dicts in which every byte depends on the version, and loads of them by dcp and stock torch.

After a crash a folder may hold an old or a new version, never a mixture: `seen_by_dcp` and `seen_by_stock`
return the version.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from tests.support.harmless_values import same
from tests.support.values import leaves

ABSENT = "absent"
"""No commit exists, and the error says so."""

MIXED = "mixed"
"""A mixture that no save has written: always an error."""

VERSIONS = 1000


def version_state(version: int, *, large: int = 0) -> dict[str, Any]:
    """Return the state dict of version 1, 2, ..., with ``large`` elements in one more tensor; version 0 is a
    target for loads."""
    generator = torch.Generator().manual_seed(version)
    weights = torch.randn(24, 10, generator=generator)
    state: dict[str, Any] = {
        "model": {
            "w": weights,
            "half": weights.sum(0).to(torch.bfloat16),
            "layers": [torch.full((3, 5), float(version)), torch.full((7,), version, dtype=torch.int64)],
            "count": torch.tensor(version),
            "empty": torch.zeros(0, 4),
        },
        "step": version,
        "lr": [0.1 * version, "warm"],
        "schedule": OrderedDict(version=version),
        "shape": torch.Size((version, 2)),
    }
    if large:
        state["large"] = torch.full((large,), version, dtype=torch.int32)
    return state


def is_version(state: dict[str, Any], version: int, *, large: int = 0) -> bool:
    """Return True if ``state`` is this version in every bit."""
    got, wanted = dict(leaves(state)), dict(leaves(version_state(version, large=large)))
    return got.keys() == wanted.keys() and all(same(got[name], value) for name, value in wanted.items())


def version_of(state: dict[str, Any], *, large: int = 0) -> int | str:
    """Return the version of ``state``, or MIXED."""
    step = state["step"]
    return step if step in range(1, VERSIONS) and is_version(state, step, large=large) else MIXED


TOGETHER: dict[str, Any] = {
    "rules": [
        {"from": {"model.w.{part}": "width row"}, "to": {"model.w": "(part row) width"}},
        {"from": {"large.{part}": "row"}, "to": {"large": "(part row)"}},
        {"from": "{name:*}", "to": "{name:*}"},
    ],
    "sizes": {"part": 2},
}
"""A weight map that joins the halves of `version_apart` to a version."""


def version_apart(version: int, *, large: int = 0, own: int | None = None) -> dict[str, Any]:
    """Return a version with some tensors in halves (``w`` transposed); with ``own``, only this half."""
    state = version_state(version, large=large)
    halves = {"w": state["model"].pop("w").chunk(2), "large": state.pop("large", torch.empty(0)).chunk(2)}
    kept = range(2) if own is None else [own]
    state["model"]["w"] = {str(part): halves["w"][part].T.contiguous() for part in kept}
    return state | ({"large": {str(part): halves["large"][part] for part in kept}} if large else {})


def save_version(folder: Path, version: int, *, large: int = 0, mapped: bool = False, **options: Any) -> None:
    """Save a version by `dcp.save` in this process alone; ``mapped``: in halves, through a weight map."""
    dcp.save(
        version_apart(version, large=large) if mapped else version_state(version, large=large),
        storage_writer=dcp.FileSystemWriter(folder, **options),
        no_dist=True,
        map=TOGETHER if mapped else None,
    )


def stock_save_version(folder: Path, version: int, *, large: int = 0) -> None:
    """Save a version by stock torch."""
    stock_save(version_state(version, large=large), checkpoint_id=folder, no_dist=True)


def seen_by_dcp(folder: Path, *, large: int = 0, **options: Any) -> int | str:
    """Return the version loaded by `dcp.load`, ABSENT, or the name of the error's class."""
    state = version_state(0, large=large)
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=True, **options)
    except dcp.CheckpointNotFoundError:
        return ABSENT
    except dcp.CheckpointError as error:
        return type(error).__name__
    return version_of(state, large=large)


def seen_by_stock(folder: Path, *, large: int = 0) -> int | str:
    """Return the version loaded by stock torch, ABSENT without `.metadata`, or the error's class."""
    if not (folder / METADATA_NAME).exists():
        return ABSENT
    state = version_state(0, large=large)
    try:
        stock_load(state, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - part of the result
        return type(error).__name__
    return version_of(state, large=large)


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder; empty if the folder is missing or another rank removes it now."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def listing(folder: Path) -> dict[str, int]:
    """Count the files of a folder by kind: manifest, metadata, data; list all others by name."""
    kinds: dict[str, int] = {}
    for name in names_in(folder):
        kind = {MANIFEST_NAME: "manifest", METADATA_NAME: "metadata"}.get(name, name)
        if name.endswith(".distcp"):
            kind = "data"
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def copy_folder(source: Path, target: Path) -> None:
    """Copy a checkpoint; without a checkpoint, copy nothing."""
    if source.exists():
        shutil.copytree(source, target)
