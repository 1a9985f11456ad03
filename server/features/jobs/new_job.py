"""Bodies that submit a job: one model for each kind, told apart by ``kind``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union

from pydantic import Field, create_model

from dcp.server.core.inputs import Request
from dcp.server.core.jobs.kind import Kind
from dcp.server.features import kinds

__all__ = ["NewJob"]


class _AnyJob(Request):
    """What all new jobs have in common; each kind has its own ``kind`` and ``params``."""

    priority: int = Field(
        default=0, ge=-100, le=100, description="The higher the sooner; above 0 needs the scope admin."
    )

    if TYPE_CHECKING:
        kind: str
        params: Any


def _new_job(kind: Kind[Any]) -> type[_AnyJob]:
    title = kind.name.replace("_", " ").title().replace(" ", "")
    fields: dict[str, Any] = {"kind": (Literal[kind.name], ...), "params": (kind.params, ...)}
    doc = kind.about or f"A job of the kind {kind.name}."
    return create_model(f"New{title}Job", __base__=_AnyJob, __doc__=doc, **fields)


if TYPE_CHECKING:
    NewJob = _AnyJob
else:
    _MODELS: Final = tuple(map(_new_job, kinds().values()))
    NewJob = Annotated[Union[_MODELS], Field(discriminator="kind")]  # noqa: UP007 - of a tuple
"""The body that submits a job: one of the kinds with its parameters."""
