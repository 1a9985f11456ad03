"""State dicts of which every byte tells the version, and who of dcp and stock torch loads which of them.

After a crash a folder may hold an old or a new version, never something in between: `seen_by_dcp` and
`seen_by_stock` say which one it is.
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
"""Nothing is committed, and the error says so."""

MIXED = "mixed"
"""What no save ever held: the one answer that is always wrong."""

VERSIONS = 1000


def version_state(version: int, *, large: int = 0) -> dict[str, Any]:
    """A state dict for version 1, 2, ..., with ``large`` elements in one more tensor; 0 is to load into."""
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
"""A weight map that makes a version of `version_apart`."""


def version_apart(version: int, *, large: int = 0, own: int | None = None) -> dict[str, Any]:
    """A version with some tensors in halves, one of them transposed; of these, one rank's ``own``."""
    state = version_state(version, large=large)
    halves = {"w": state["model"].pop("w").chunk(2), "large": state.pop("large", torch.empty(0)).chunk(2)}
    kept = range(2) if own is None else [own]
    state["model"]["w"] = {str(part): halves["w"][part].T.contiguous() for part in kept}
    return state | ({"large": {str(part): halves["large"][part] for part in kept}} if large else {})


def save_version(folder: Path, version: int, *, large: int = 0, mapped: bool = False, **options: Any) -> None:
    """`dcp.save` of one version by this process alone; ``mapped``: in halves, through a weight map."""
    dcp.save(
        version_apart(version, large=large) if mapped else version_state(version, large=large),
        storage_writer=dcp.FileSystemWriter(folder, **options),
        no_dist=True,
        map=TOGETHER if mapped else None,
    )


def stock_save_version(folder: Path, version: int, *, large: int = 0) -> None:
    """Stock torch's save of one version."""
    stock_save(version_state(version, large=large), checkpoint_id=folder, no_dist=True)


def seen_by_dcp(folder: Path, *, large: int = 0, **options: Any) -> int | str:
    """The version that `dcp.load` gives, ABSENT, or the name of the error's class."""
    state = version_state(0, large=large)
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=True, **options)
    except dcp.CheckpointNotFoundError:
        return ABSENT
    except dcp.CheckpointError as error:
        return type(error).__name__
    return version_of(state, large=large)


def seen_by_stock(folder: Path, *, large: int = 0) -> int | str:
    """The version that stock torch's load gives, ABSENT without `.metadata`, or the error's class."""
    if not (folder / METADATA_NAME).exists():
        return ABSENT
    state = version_state(0, large=large)
    try:
        stock_load(state, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - what stock says is what is asked for
        return type(error).__name__
    return version_of(state, large=large)


def names_in(folder: Path) -> list[str]:
    """Of what is in a folder, sorted; nothing where there is none, or another rank removes it just now."""
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
    """A copy of a checkpoint, or of nothing."""
    if source.exists():
        shutil.copytree(source, target)
