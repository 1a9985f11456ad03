"""Checkpoints of a model and its optimizer, saved by dcp or by stock torch, with or without separate files
for the optimizer; and their loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import dcp


def full_state(version: int = 1) -> dict[str, Any]:
    """Return a state in which every tensor depends on the version and its name; 0 is a target for loads.

    The optimizer has numbers as keys and an empty dict; two weights are tied; a weight is named like an
    optimizer.
    """
    weight = torch.arange(3000, dtype=torch.float32) * version
    return {
        "app": {
            "model": {
                "w": weight.view(-1, 10),
                "head": weight.view(-1, 10),
                "optim_head": {"weight": torch.full((7,), float(version))},
            },
            "optimizer": {
                "state": {
                    number: {
                        "exp_avg": weight + number * version,
                        "exp_avg_sq": weight + 2 * number * version,
                        "step": torch.tensor(float(version)),
                    }
                    for number in range(2)
                },
                "param_groups": [{"lr": 0.1 * version, "betas": (0.9, 0.99), "params": [0, 1], "more": {}}],
            },
        },
        "step": version,
    }


def save_mixed(folder: Path, version: int = 1) -> None:
    """Save by `dcp.save`, with all data of a rank in one file."""
    dcp.save(full_state(version), checkpoint_id=folder, no_dist=True)


def save_apart(folder: Path | str, version: int = 1, **options: Any) -> None:
    """Save with the optimizer in separate files."""
    writer = dcp.FileSystemWriter(folder, **options)
    dcp.save(full_state(version), storage_writer=writer, no_dist=True, apart="optimizer")


def save_stock(folder: Path, version: int = 1) -> None:
    """Save by stock torch."""
    stock_save(full_state(version), checkpoint_id=folder, no_dist=True)


def _is_version(state: dict[str, Any], version: int) -> bool:
    wanted = full_state(version)["app"]
    found = state["app"]
    if not all(torch.equal(found["model"][name], wanted["model"][name]) for name in ("w", "head")):
        return False
    if not torch.equal(found["model"]["optim_head"]["weight"], wanted["model"]["optim_head"]["weight"]):
        return False
    if state["step"] != version:
        return False
    if "optimizer" not in found:
        return True
    own, others = found["optimizer"], wanted["optimizer"]
    return own["param_groups"] == others["param_groups"] and all(
        torch.equal(own["state"][number][name], others["state"][number][name])
        for number in (0, 1)
        for name in ("exp_avg", "exp_avg_sq", "step")
    )


def weights_of_stock() -> dict[str, Any]:
    """Return a state without an optimizer, as a target for loads."""
    state = full_state(0)
    del state["app"]["optimizer"]
    return state


def _there(load: Any, version: int) -> str:
    whole, weights = full_state(0), weights_of_stock()
    try:
        load(whole)
        return "whole" if _is_version(whole, version) else "mixed"
    except (Exception, CheckpointException):  # noqa: BLE001 - stock torch raises errors of any class
        load(weights)
        return "weights" if _is_version(weights, version) else "mixed"


def seen_by_stock_at(url: str, version: int = 1, **options: Any) -> str:
    """Load by torch's reader for object stores; return the result. ``options`` are those of the file
    system."""
    return _there(
        lambda state: stock_load(state, storage_reader=FsspecReader(url, **options), no_dist=True), version
    )


def present_parts(folder: Path | str, version: int = 1, **options: Any) -> str:
    """Load by `dcp.load`; return the content: "whole", "weights", or "mixed", which no save has written."""
    return _there(partial(dcp.load, checkpoint_id=folder, no_dist=True, **options), version)


def stock_sees(folder: Path, version: int = 1) -> str:
    """Load by stock torch, and return the content."""
    return _there(partial(stock_load, checkpoint_id=folder, no_dist=True), version)
