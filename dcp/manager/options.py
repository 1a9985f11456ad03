"""What a manager is asked for, as one value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from dcp.manager.catalog import CatalogRegistration
from dcp.manager.cleanup.after_commit import Check
from dcp.manager.cleanup.retention import Retention
from dcp.manager.coordination import StepCoordinator
from dcp.manager.events import EventCallback
from dcp.manager.notices import Grace, Notices, grace_of
from dcp.manager.saving import Mode, SaveSettings, WhenBusy
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.ranks.channel import Channel
from dcp.saving.options import SaveOptions
from dcp.storage.errors import OptionError
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager

__all__ = ["ManagerOptions", "OnFailure"]

OnFailure = Literal["warn", "raise"]

_CHOICES = {"mode": Mode, "when_busy": WhenBusy, "on_failure": OnFailure, "verify_saved": Check}

_ALIKE = (
    "mode",
    "every_steps",
    "save_first",
    "when_busy",
    "on_failure",
    "retries",
    "handle_sigterm",
    "weights",
    "agree_every_steps",
)
"""What would leave ranks in different steps."""


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """The options of `CheckpointManager`, which says what they mean. Raises OptionError for what is no
    choice."""

    root: str | os.PathLike[str]
    process_group: ProcessGroup | None
    no_dist: bool
    mode: Mode
    every_steps: int | None
    every_seconds: float | None
    save_first: bool
    keep: Retention | None
    when_busy: WhenBusy
    on_failure: OnFailure
    retries: int
    retry_pause_seconds: float
    verify_saved: Check
    handle_sigterm: bool
    grace_seconds: Grace | None
    weights: str | Sequence[str]
    name: Callable[[int], str] | str
    writer: Callable[[str], FileSystemWriter] | None
    planner: SavePlanner | None
    stager: AsyncStager | None
    run: str | None
    on_event: EventCallback | Sequence[EventCallback] | None
    progress: bool | ProgressCallback | None
    timeout_seconds: float
    agree_every_steps: int
    storage_options: Mapping[str, Any] | None
    catalog: str | CatalogRegistration | None
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            value, choices = getattr(self, name), get_args(kind)
            if value not in choices:
                raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        if self.keep is not None and not isinstance(self.keep, Retention):
            raise OptionError(f"keep must be a Retention, such as Retention(last=3), not {self.keep!r}")
        if self.map is not None:
            object.__setattr__(self, "map", WeightMap.of(self.map))  # a file is read once
        grace_of(self.grace_seconds, handle_sigterm=self.handle_sigterm)  # said before any rank waits

    def alike(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        by_clock = self.every_seconds and "given"  # by the clock of rank 0
        alike = {name: getattr(self, name) for name in _ALIKE}
        alike |= {"every_seconds": by_clock, "grace_seconds": self.grace_seconds is not None}
        return alike if self.weights_map is None else alike | {"map": self.weights_map.mark}

    @property
    def weights_map(self) -> WeightMap | None:
        """The map that each step is saved through."""
        return None if self.map is None else WeightMap.of(self.map)

    @property
    def saved_first(self) -> tuple[str, ...]:
        """The entries that are saved first before a deadline; () where there is none to come."""
        names = (self.weights,) if isinstance(self.weights, str) else tuple(self.weights)
        return () if self.grace_seconds is None else names

    def make_writer(self, checkpoint_id: str) -> FileSystemWriter:
        """The writer of a checkpoint."""
        return (self.writer if self.writer is not None else FileSystemWriter)(checkpoint_id)

    def coordinator(self, channel: Channel | None) -> StepCoordinator:
        """What says on all ranks which steps are saved."""
        seen_by_one = self.handle_sigterm or self.grace_seconds is not None or self.every_seconds is not None
        return StepCoordinator(
            Notices(*grace_of(self.grace_seconds, handle_sigterm=self.handle_sigterm)),
            channel,
            every_steps=self.every_steps,
            every_seconds=self.every_seconds,
            save_first=self.save_first,
            exchanges=seen_by_one or self.on_failure == "raise",
            agree_every_steps=self.agree_every_steps,
            timeout_seconds=self.timeout_seconds,
        )

    def save_settings(self, *, no_dist: bool) -> SaveSettings:
        """What is the same for all saves."""
        options = SaveOptions(
            progress=self.progress,
            timeout_seconds=self.timeout_seconds,
            retries=self.retries,
            retry_pause_seconds=self.retry_pause_seconds,
            map=self.weights_map,
            map_leads_back=True,
            apart=() if self.keep is None else tuple(part.patterns for part in self.keep.dropping),
        )
        return SaveSettings(self.process_group, no_dist, self.planner, self.stager, options)
