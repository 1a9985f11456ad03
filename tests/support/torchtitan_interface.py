"""Stand-in for the checkpoint manager of torchtitan 0.3, whose public methods call hooks, and of the previous
version.

`install` makes either version importable as torchtitan's.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import torch

__all__ = ["Interface", "install"]

Interface = Literal["hooks", "older"]


class _Model:
    """The parts of a model as one object with a state."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict(state_dict, strict=False)


@dataclass(kw_only=True, slots=True)
class _Config:
    enable: bool = False
    folder: str = "checkpoint"
    interval: int = 500
    async_mode: str = "disabled"
    keep_latest_k: int = 10
    load_only: bool = False
    enable_first_step_checkpoint: bool = False
    initial_load_path: str | None = None
    initial_load_in_hf: bool = False
    last_save_model_only: bool = True
    last_save_in_hf: bool = False
    export_dtype: str = "float32"
    exclude_from_loading: list[str] = field(default_factory=list)


class _Parts:
    """The common state of both managers."""

    def _take(self, config: Any, parts: dict[str, Any], base_folder: str) -> None:
        self.enable = config.enable
        for name in ("async_mode", "keep_latest_k"):  # the subclass sets these itself
            assert getattr(config, name) in ("disabled", 0)
        self.states = parts["states"] | {
            "model": _Model(parts["model_parts"]),
            "optimizer": parts["optimizers"],
            "dataloader": parts["dataloader"],
            "lr_scheduler": parts["lr_schedulers"],
        }
        self.folder = os.path.join(base_folder, config.folder)  # noqa: PTH118 - like torchtitan
        self.export_dtype = getattr(torch, config.export_dtype)
        self.interval, self.load_only = config.interval, config.load_only
        self.exclude_from_loading = config.exclude_from_loading
        self.enable_first_step_checkpoint = config.enable_first_step_checkpoint
        self.last_save_model_only, self.last_save_in_hf = config.last_save_model_only, config.last_save_in_hf
        self.initial_load_path = config.initial_load_path
        self.save_future = self.staging_future = None

    def _find_load_step(self, folder: str = "") -> int:
        return -1

    def _begin(self: Any, step: int) -> bool:
        """Load the initial model if the folder has no checkpoint."""
        if step != -1 or self._find_load_step() != -1 or self.initial_load_path is None:
            return False
        self.dcp_load(self.states["model"].state_dict(), self.initial_load_path, False, False)
        return True


class _Hooks(_Parts):
    """The manager of 0.3: public methods check whether checkpoints are enabled, and call hooks."""

    Config = _Config

    def __init__(self, config: Any, *, base_folder: str = "", **parts: Any) -> None:
        self._take(config, parts, base_folder)

    def __init_subclass__(cls) -> None:
        owner = cls

        def build(config: Any, **parts: Any) -> Any:
            return owner(config=replace(config), **parts)

        cls.Config.build = build  # type: ignore[attr-defined]

    def load(self: Any, step: int = -1) -> bool:
        return bool(self.enable and self._load(step))

    def _load(self, step: int = -1) -> bool:
        return self._begin(step)


class _Older(_Parts):
    """The manager of the previous version: no hooks, and another name of the config."""

    def __init__(self, *, checkpoint_config: Any, base_folder: str = "", **parts: Any) -> None:
        self._take(checkpoint_config, parts, base_folder)

    def load(self, step: int = -1) -> bool:
        return bool(self.enable) and self._begin(step)


def install(interface: Interface) -> Any:
    """Make a version importable; return the class of its config."""
    name = f"torchtitan.components.{'checkpointer' if interface == 'hooks' else 'checkpoint'}"
    module = ModuleType(name)
    module.CheckpointManager = _Hooks if interface == "hooks" else _Older  # type: ignore[attr-defined]
    for package in ("torchtitan", "torchtitan.components"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    sys.modules[name] = module
    return _Config
