"""What addresses of pages may say of lists of checkpoints; what they cannot is refused, as by the API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.facts import State, Verification
from dcp.server.formats import FormatName
from dcp.server.inputs import MAX_ID, Name
from dcp.server.schemas.administration.retention import Keep

__all__ = ["CheckpointsView", "ListView", "RunView"]

_LISTS: Final = ("state", "verification", "format", "tag")
_PLAIN: Final = ("pinned", "root", "run", "dtype", "tensor", "name_contains", "min_step", "max_step")
_Step = Annotated[int, Field(ge=0, le=MAX_ID)]
_Count = Annotated[int, Field(ge=1, le=10**12)]
_Text = Annotated[str, Field(max_length=1024)]


class ListView(BaseModel):
    """Which checkpoints, in which order, with which metric."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: Name | None = None
    state: State | Literal["any"] | None = None
    verification: Verification | None = None
    format: FormatName | None = None
    tag: Name | None = None
    pinned: bool | None = None
    dtype: _Text | None = None
    tensor: _Text | None = None
    name_contains: _Text | None = None
    min_step: _Step | None = None
    max_step: _Step | None = None
    sort: Annotated[str, Field(max_length=140)] = "-time"
    cursor: Annotated[str, Field(max_length=4096)] | None = None

    @property
    def filters(self) -> dict[str, Any]:
        """As the API is asked for them."""
        lists = {name: [getattr(self, name)] for name in _LISTS if getattr(self, name)}
        plain = {name: getattr(self, name, None) for name in _PLAIN}
        return lists | {name: value for name, value in plain.items() if value is not None}


class CheckpointsView(ListView):
    """What the list of all runs' checkpoints is asked for."""

    root: Annotated[str, Field(max_length=63)] | None = None
    run: _Text | None = None


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
