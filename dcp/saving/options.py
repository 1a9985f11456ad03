"""What a save is asked for beside its state dict, as one value that is handed down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp.progress import ProgressCallback
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS

__all__ = ["SaveOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Those of `dcp.save` and `CheckpointManager`, which say what they mean."""

    use_collectives: bool = True
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    progress: bool | ProgressCallback | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    retries: int = 0
    retry_pause_seconds: float = 1.0
