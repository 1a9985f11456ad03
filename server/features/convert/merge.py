"""Merges (kind ``merge``): the weighted sum of checkpoints under a root, as a conversion of several
sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from sqlalchemy import Connection

from dcp.conversion.arithmetic import Arithmetic, weights_of_adapters, weights_of_sources
from dcp.server.catalog.runs import get_run
from dcp.server.catalog.timeline import newest_steps
from dcp.server.core.jobs.kind import CheckpointId, JobContext
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import Subject, find_subject, open_source, storage_errors
from dcp.server.core.roots import StorageRoot
from dcp.server.features.convert.conversion import TargetKind
from dcp.server.features.convert.options import TargetParams
from dcp.server.features.lineage import LineageKind
from dcp.storage.errors import PlanError

if TYPE_CHECKING:
    from dcp.conversion.targets.job import ConversionOptions
    from dcp.storage.formats.opening import Source

_Weight = Annotated[float, Field(ge=-1e9, le=1e9)]
_Weights = Annotated[tuple[_Weight, ...], Field(min_length=1, max_length=64, strict=False)]


class MergeParams(TargetParams):
    """Checkpoints ``sources``, and ``adapters`` in the layout of PEFT, as for `dcp.merge`.

    ``run_id`` and ``last`` replace sources by the newest steps of a run when the job is planned. ``weights``,
    ``formula``, and ``decay`` exclude each other; for ``decay`` the first source is the newest. A ``map``
    applies to all sources and excludes adapters.
    """

    sources: Annotated[tuple[CheckpointId, ...], Field(max_length=64, strict=False)] = Field(
        default=(), description="The `id`s of the checkpoints to add."
    )
    run_id: CheckpointId | None = Field(default=None, description="Run whose newest steps are the sources.")
    last: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="Number of steps of `run_id`."
    )
    weights: _Weights | None = Field(
        default=None, description="Weights of the sources, in order; default: the mean."
    )
    formula: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None,
        description="Replaces `weights`, such as A + 0.4 * (B - C), where A is the first source.",
    )
    decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Decay of an exponential moving average: the k-th newest source weighs `decay**k`.",
    )
    adapters: Annotated[tuple[CheckpointId, ...], Field(max_length=64, strict=False)] = Field(
        default=(), description="The `id`s of LoRA adapters to add."
    )
    adapter_weights: _Weights | None = Field(
        default=None, description="Weights of the adapters, multiplied with their own scales; default: 1."
    )
    accumulate: Literal["float32", "float64"] = Field(default="float32", description="Dtype of the sum.")

    @model_validator(mode="after")
    def _window(self) -> Self:
        if (self.run_id is None) != (self.last is None):
            raise ValueError("run_id and last: pass both or neither")
        if self.run_id is not None and (self.sources or self.weights is not None or self.formula is not None):
            raise ValueError("run_id requires last, and excludes sources, weights and formula")
        return self

    @model_validator(mode="after")
    def _computed(self) -> Self:
        try:
            self.arithmetic()
        except PlanError as error:
            raise ValueError(str(error)) from None
        if self.map is not None and self.adapters:
            raise ValueError("map and adapters exclude each other: merge the adapters first, then convert")
        if len({*self.source_ids}) < len(self.source_ids):
            raise ValueError("sources and adapters must be different checkpoints")
        return self

    @property
    def source_ids(self) -> Sequence[int]:
        """Ids of the given sources and adapters."""
        return (*self.sources, *self.adapters)

    def arithmetic(self) -> Arithmetic:
        """Return the weighted sum. Raises OptionError for invalid weights."""
        count = self.last or len(self.sources)
        own = weights_of_sources(count, self.weights, self.formula, self.decay)
        added = weights_of_adapters(len(self.adapters), self.adapter_weights)
        return Arithmetic(own, added, self.accumulate)

    def options(self) -> ConversionOptions:
        """Return the options of the conversion."""
        return replace(super().options(), arithmetic=self.arithmetic())


class MergeKind(TargetKind[MergeParams]):
    """Merge of several checkpoints; all sources are parents."""

    name: ClassVar[str] = "merge"
    about: ClassVar[str] = "Add checkpoints with weights, or average the newest steps of a run."
    lineage: ClassVar[LineageKind] = "merged_from"
    done: ClassVar[str] = "checkpoint.merge"
    params = MergeParams

    def subjects(
        self, connection: Connection, params: MergeParams, visible: frozenset[str] | None = None
    ) -> list[Subject]:
        """As `TargetKind.subjects`; for a run, its newest steps."""
        numbers = list(params.source_ids)
        if params.run_id is not None and params.last is not None:
            get_run(connection, params.run_id, visible)
            numbers = [*newest_steps(connection, params.run_id, params.last), *numbers]
        return [find_subject(connection, number, visible) for number in numbers]

    def made_of(self, subjects: Sequence[Subject], params: MergeParams) -> list[Json]:
        """As `TargetKind.made_of`, with the weights."""
        sums = params.arithmetic()
        weights = (*sums.weights, *sums.adapter_weights)
        return [
            {"id": one.id, "root": one.root, "key": one.key, "step": one.step, "weight": weight}
            for one, weight in zip(subjects, weights, strict=True)
        ]

    def open(self, context: JobContext, subjects: Sequence[Subject]) -> tuple[list[StorageRoot], Source]:
        """As `TargetKind.open`."""
        from dcp.conversion.merging import open_joined

        roots = [context.roots.get(name) for name in {one.root for one in subjects} if name in context.roots]
        members = [partial(_source_of, context, one) for one in subjects]
        with storage_errors(*roots):
            return roots, open_joined(members)


def _source_of(context: JobContext, subject: Subject) -> Source:
    return open_source(context, subject)[1]
