"""`SimpleKind`: a job of one task that reads checkpoints and returns what it found."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from sqlalchemy import Connection

from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, PermanentJobError, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.jobs.parameters import CheckpointId, Parameters
from dcp.server.core.jobs.subjects import Subject, find_subject
from dcp.server.core.security.principal import Principal
from dcp.server.core.settings import Settings

__all__ = ["CheckpointParams", "SimpleKind"]

P = TypeVar("P", bound=Parameters)


class CheckpointParams(Parameters):
    """The checkpoint."""

    checkpoint_id: CheckpointId


class SimpleKind(Kind[P]):
    """A kind of which `run` is all that has to be written, beside ``name``, ``scope`` and ``params``.

    ``subjects`` are the parameters that are ids of checkpoints. These must be committed and visible to
    the caller; the job is about the last one. An unfinished job with the same parameters is
    joined.
    """

    subjects: ClassVar[tuple[str, ...]] = ("checkpoint_id",)

    @abstractmethod
    def run(
        self, context: JobContext, params: P, subjects: Sequence[Subject], report_progress: ReportProgress
    ) -> Json:
        """Read the checkpoints ``subjects``, and return the result of the job, which is JSON.

        In a subprocess without the database, which may be killed and called again.
        """

    def specify(self, connection: Connection, params: P, caller: Principal, settings: Settings) -> JobSpec:
        """As `Kind.specify`."""
        *_, subject = [find_subject(connection, one, caller.roots) for one in self._numbers(params)]
        numbers = self._numbers(params)
        return self.new_job(params, caller, root=subject.root, checkpoint_id=subject.id, subjects=numbers)

    def prepare(self, connection: Connection, params: P) -> Json:
        """As `Kind.prepare`."""
        found = [find_subject(connection, number) for number in self._numbers(params)]
        return {"subjects": [subject.to_json() for subject in found]}

    def plan(self, context: JobContext, params: P) -> JobPlan:
        """As `Kind.plan`."""
        subjects = context.prepared["subjects"]
        payload = {"params": params.model_dump(mode="json"), "subjects": subjects}
        weight_bytes = sum(subject["bytes"] for subject in subjects)
        return JobPlan(tasks=[TaskSpec(payload=payload, weight_bytes=weight_bytes)])

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        subjects = [Subject(**one) for one in payload["subjects"]]
        found = self.run(context, self.params.model_validate(payload["params"]), subjects, report_progress)
        if not isinstance(found, Mapping):
            raise PermanentJobError(f"the kind {self.name} returned {type(found).__name__}, and no dict")
        return found

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return dict(results[0])

    def _numbers(self, params: P) -> list[int]:
        return [getattr(params, name) for name in self.subjects]
