"""Query of a run's page: which of its checkpoints are listed, and what retention is tried out on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dcp.server.core.inputs import MAX_ID, Name
from dcp.server.features.checkpoints.views import ListView
from dcp.server.features.retention.policies import Keep

__all__ = ["RunView"]

_Step = Annotated[int, Field(ge=0, le=MAX_ID)]
_Count = Annotated[int, Field(ge=1, le=10**12)]


class RunView(ListView):
    """What the page of a run is asked for: its checkpoints, and what retention is tried out on it."""

    sort: Annotated[str, Field(max_length=140)] = "-step"
    keep_last: _Count | None = None
    keep_every: _Count | None = None
    keep_best: _Count | None = None
    keep_metric: Name | None = None
    keep_mode: Literal["min", "max"] = "min"
    keep_optimizer: _Count | None = None
    keep_days: Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)] | None = None
    below_step: _Step | None = None

    @property
    def keep(self) -> Keep | None:
        """What is tried out; None if nothing was said."""
        given: dict[str, Any] = {"last": self.keep_last, "every_steps": self.keep_every}
        if self.keep_best and self.keep_metric:
            given["best"] = [{"metric": self.keep_metric, "count": self.keep_best, "mode": self.keep_mode}]
        if self.keep_days:
            given["younger_than_seconds"] = self.keep_days * 86_400
        if self.keep_optimizer:
            given["optimizer"] = {"last": self.keep_optimizer}
        given = {name: value for name, value in given.items() if value is not None}
        return Keep(**given) if given else None
