"""A state as a request tells of it: names, shapes and dtypes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from dcp.server.core.inputs import Request

__all__ = ["StateRequest", "StateTensorRequest"]

_Fqn = Annotated[str, StringConstraints(max_length=4096)]
_MOST = 100_000


class StateTensorRequest(Request):
    """A tensor of a state; a shape or dtype that is null is not compared."""

    fqn: _Fqn
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 53)]], Field(max_length=64)] | None = None
    dtype: Annotated[str, Field(max_length=32, examples=["bfloat16"])] | None = None


class StateRequest(Request):
    """The state that is to be filled. Without `objects` nothing is said of values that are no tensors."""

    tensors: Annotated[list[StateTensorRequest], Field(max_length=_MOST)]
    objects: Annotated[list[_Fqn], Field(max_length=_MOST)] | None = None
