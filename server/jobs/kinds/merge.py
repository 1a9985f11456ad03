"""``merge``: the weighted sum of checkpoints, under a root. It is a conversion of several as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from sqlalchemy import Connection

from dcp.conversion.merging.arithmetic import Arithmetic, weights_of_adapters, weights_of_sources
from dcp.server.catalog.lineage import LineageKind
from dcp.server.jobs.kind import JobContext
from dcp.server.jobs.kinds.convert import TargetKind, TargetParams
from dcp.server.jobs.kinds.shared.parameters import CheckpointId
from dcp.server.jobs.kinds.shared.subjects import Subject, find_subject, open_source, storage_errors
from dcp.server.jobs.ledger.states import Json
from dcp.server.roots import StorageRoot
from dcp.storage.errors import PlanError

if TYPE_CHECKING:
    from dcp.conversion.plan import ConversionOptions
    from dcp.storage.formats.opening.sources import Source

__all__ = ["MergeKind", "MergeParams"]

_Weight = Annotated[float, Field(ge=-1e9, le=1e9)]
_Weights = Annotated[tuple[_Weight, ...], Field(min_length=1, max_length=64, strict=False)]


class MergeParams(TargetParams):
    """The checkpoints ``sources``, and ``adapters`` in the layout of peft, as `dcp.merge` takes them.

    There is no ``map``. At most one of ``weights``, ``formula`` and ``decay``: with the last the first source
    is the newest.
    """

    sources: Annotated[tuple[CheckpointId, ...], Field(min_length=1, max_length=64, strict=False)]
    weights: _Weights | None = None
    formula: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    adapters: Annotated[tuple[CheckpointId, ...], Field(max_length=64, strict=False)] = ()
    adapter_weights: _Weights | None = None
    accumulate: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _computed(self) -> Self:
        try:
            self.arithmetic()
        except PlanError as error:
            raise ValueError(str(error)) from None
        if self.map is not None:
            raise ValueError("map: merge first, and convert what comes of it")
        if len({*self.source_ids}) < len(self.source_ids):
            raise ValueError("sources and adapters must differ from each other")
        return self

    @property
    def source_ids(self) -> Sequence[int]:
        """All of them."""
        return (*self.sources, *self.adapters)

    def arithmetic(self) -> Arithmetic:
        """What is computed. OptionError for weights that cannot be."""
        own = weights_of_sources(len(self.sources), self.weights, self.formula, self.decay)
        added = weights_of_adapters(len(self.adapters), self.adapter_weights)
        return Arithmetic(own, added, self.accumulate)

    def options(self) -> ConversionOptions:
        """Of the conversion."""
        return replace(super().options(), arithmetic=self.arithmetic())


class MergeKind(TargetKind[MergeParams]):
    """Of several checkpoints, which are all its parents."""

    name: ClassVar[str] = "merge"
    lineage: ClassVar[LineageKind] = "merged_from"
    params = MergeParams

    def prepare(self, connection: Connection, params: MergeParams) -> Json:
        """As `Kind.prepare`."""
        return {"subjects": [find_subject(connection, number).to_json() for number in params.source_ids]}

    def open(self, context: JobContext, subject: Json) -> tuple[list[StorageRoot], Source]:
        """As `TargetKind.open`."""
        from dcp.conversion.merging.joined import open_joined

        subjects = [Subject(**one) for one in subject["subjects"]]
        roots = [context.roots.get(name) for name in {one.root for one in subjects} if name in context.roots]
        members = [partial(_source_of, context, one) for one in subjects]
        with storage_errors(*roots):
            return roots, open_joined(members)


def _source_of(context: JobContext, subject: Subject) -> Source:
    return open_source(context, subject)[1]
