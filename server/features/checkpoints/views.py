"""What addresses of pages may say of lists of checkpoints; what they cannot is refused, as by the API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from dcp.server.catalog.formats import FormatName
from dcp.server.core.inputs import MAX_ID, Name
from dcp.server.records.checkpoints import State, Verification

__all__ = ["CheckpointsView", "ListView"]

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
