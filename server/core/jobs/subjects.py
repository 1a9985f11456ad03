"""Checkpoints of jobs: found in the catalog, opened in a task, compared when the result is recorded.

`SimpleKind` is a kind with one task that reads checkpoints and returns its result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from pydantic import Field
from sqlalchemy import Connection, select

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import MissingError, StateError
from dcp.server.catalog.source_facts import fingerprint_of, marks_of
from dcp.server.core.jobs.kind import (
    CheckpointId,
    JobContext,
    JobPlan,
    Kind,
    Parameters,
    PermanentJobError,
    ReportProgress,
    TaskSpec,
    TransientJobError,
    UnavailableJobError,
)
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.problems import ProblemError
from dcp.server.core.roots import StorageRoot, storage_problem
from dcp.server.core.security.principal import Principal
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import checkpoints, roots
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.opening import Source, SourcePlace, index_at

if TYPE_CHECKING:
    from dcp.inspection.values.tensor_reading import TensorReader

_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint for tasks: its place, and the expected content."""

    id: int
    root: str
    key: str
    run: str
    name: str
    step: int | None
    format: str
    bytes: int
    save_id: str | None
    fingerprint: str | None
    deleted_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; ``Subject(**data)`` is the inverse."""
        return asdict(self)

    @property
    def content(self) -> str | None:
        """The name of the content, as far as known."""
        return self.save_id or self.fingerprint

    def is_same(self, row: Mapping[Any, Any]) -> bool:
        """Return True if ``row``, a row of `tables.checkpoints`, still has this content as far as known."""
        for name, mine in (("save_id", self.save_id), ("fingerprint", self.fingerprint)):
            if mine is not None and row[name] is not None:
                return bool(row[name] == mine)
        return True


def find_subject(
    connection: Connection,
    checkpoint_id: int,
    visible: frozenset[str] | None = None,
    *,
    state: str = "committed",
) -> Subject:
    """Return the checkpoint in the required ``state``. Raises MissingError or StateError."""
    found = get_checkpoint(connection, checkpoint_id, visible)
    if found.state != state:
        raise StateError(f"checkpoint {checkpoint_id} is {found.state}, not {state}", state=found.state)
    deleted_seconds = None if found.deleted_at is None else found.deleted_at.timestamp()
    values = {field.name: getattr(found, field.name) for field in fields(Subject)[:-1]}
    return Subject(**values, deleted_seconds=deleted_seconds)


def roots_of_committed(
    connection: Connection, numbers: Sequence[int], visible: frozenset[str] | None
) -> set[str]:
    """Return the roots of committed checkpoints with few queries. Raises like `find_subject`."""
    found: dict[int, tuple[str, str]] = {}
    for start in range(0, len(numbers), _CHUNK):
        query = (
            select(checkpoints.c.id, checkpoints.c.state, roots.c.name)
            .join(roots, roots.c.id == checkpoints.c.root_id)
            .where(checkpoints.c.id.in_(numbers[start : start + _CHUNK]))
        )
        found |= {number: (state, root) for number, state, root in connection.execute(query)}
    for number in numbers:
        state, root = found.get(number, ("", ""))
        if not state or (visible is not None and root not in visible):
            raise MissingError("checkpoint", number)
        if state != "committed":
            raise StateError(f"checkpoint {number} is {state}, not committed", state=state)
    return {root for _, root in found.values()}


def open_place(context: JobContext, subject: Subject) -> tuple[StorageRoot, SourcePlace]:
    """Return the root and the place of the checkpoint. Raises PermanentJobError for a removed root."""
    if subject.root not in context.roots:
        raise PermanentJobError(f"root {subject.root} is no longer configured")
    root = context.roots.get(subject.root)
    with storage_errors(root):
        return root, root.place(subject.key)


def open_source(context: JobContext, subject: Subject) -> tuple[StorageRoot, Source]:
    """Return the root, and the checkpoint with its index."""
    root, place = open_place(context, subject)
    with storage_errors(root):
        return root, Source(place.store, index_at(place), f"{root.name}:{subject.key}", place.file)


def fingerprint_at(place: SourcePlace) -> str:
    """Return the fingerprint of the checkpoint at ``place``, which differs after a change."""
    if place.file is not None:
        info = place.store.stat(place.file)
        return fingerprint_of([] if info is None else [info])
    return fingerprint_of(marks_of(place.store.list()))


@contextmanager
def unchanged(place: SourcePlace) -> Iterator[str]:
    """Yield the fingerprint of the content read in the block. Raises TransientJobError after a change, also
    if the block fails because of the change."""
    fingerprint = fingerprint_at(place)
    failure: CheckpointError | None = None
    try:
        yield fingerprint
    except CheckpointError as error:
        if isinstance(error, OSError):  # of the storage: repeated anyway
            raise
        failure = error
    if fingerprint_at(place) != fingerprint:
        raise TransientJobError("the checkpoint was replaced during the read") from failure
    if failure is not None:
        raise failure


@contextmanager
def read_tensors(context: JobContext, *subjects: Subject) -> Iterator[list[tuple[TensorReader, str]]]:
    """Yield for each checkpoint a verifying reader and the fingerprint. Raises like `unchanged` and
    `storage_errors`."""
    from dcp.inspection.values.tensor_reading import TensorReader

    found = []
    places = [open_place(context, subject) for subject in subjects]
    with storage_errors(*{root.name: root for root, _ in places}.values()), ExitStack() as stack:
        for subject, (root, place) in zip(subjects, places, strict=True):
            fingerprint = stack.enter_context(unchanged(place))
            name = f"{root.name}:{subject.key}"
            reader = TensorReader(place.store, index_at(place), verify="full", name=name)
            found.append((stack.enter_context(reader), fingerprint))
        yield found


@contextmanager
def open_database(context: JobContext) -> Iterator[Database]:
    """Yield the database for kinds that need it. Raises UnavailableJobError."""
    database = Database(context.settings.database_url.get_secret_value(), pool_size=2)
    try:
        yield database
    except DatabaseUnavailableError as error:
        raise UnavailableJobError("the database is unreachable, full or locked") from error
    finally:
        database.close()


@contextmanager
def storage_errors(*roots: StorageRoot) -> Iterator[None]:
    """Translate storage and format errors to problems that name roots and keys only."""
    try:
        yield
    except ProblemError:
        raise
    except (CheckpointError, OSError) as error:
        path = error.path if isinstance(error, CheckpointError) else str(error.filename or "")
        named = next(
            (root for root in roots if path.startswith(root.url)), roots[0] if len(roots) == 1 else None
        )
        problem = storage_problem(error, root=named, is_known=True)
        for root in roots:
            problem.detail = root.hide(problem.detail)
        raise problem from error


# -- `SimpleKind` --------------------------------------------------------------------------------------------


P = TypeVar("P", bound=Parameters)


class CheckpointParams(Parameters):
    """Parameters with one checkpoint."""

    checkpoint_id: CheckpointId = Field(description="The `id` of the checkpoint.")


class SimpleKind(Kind[P]):
    """A kind that implements only `run`, besides ``name``, ``scope`` and ``params``.

    ``subjects`` are the parameters with checkpoint ids. The checkpoints must be committed and visible to the
    caller; the job belongs to the last one. An unfinished job with the same parameters is joined.
    """

    subjects: ClassVar[tuple[str, ...]] = ("checkpoint_id",)

    @abstractmethod
    def run(
        self, context: JobContext, params: P, subjects: Sequence[Subject], report_progress: ReportProgress
    ) -> Json:
        """Read the checkpoints ``subjects``, and return the JSON result of the job.

        Runs in a subprocess without the database, which may be killed and called again.
        """

    def specify(self, connection: Connection, params: P, caller: Principal, settings: Settings) -> JobSpec:
        """Return the job; see `Kind.specify`."""
        *_, subject = [find_subject(connection, one, caller.roots) for one in self._numbers(params)]
        numbers = self._numbers(params)
        return self.new_job(
            params, caller.name, root=subject.root, checkpoint_id=subject.id, subjects=numbers
        )

    def prepare(self, connection: Connection, params: P) -> Json:
        """Read the facts for planning; see `Kind.prepare`."""
        found = [find_subject(connection, number) for number in self._numbers(params)]
        return {"subjects": [subject.to_json() for subject in found]}

    def plan(self, context: JobContext, params: P) -> JobPlan:
        """Return a plan with one task; see `Kind.plan`."""
        subjects = context.prepared["subjects"]
        payload = {"params": params.model_dump(mode="json"), "subjects": subjects}
        weight_bytes = sum(subject["bytes"] for subject in subjects)
        return JobPlan(tasks=[TaskSpec(payload=payload, weight_bytes=weight_bytes)])

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """Call `run`; see `Kind.run_task`."""
        subjects = [Subject(**one) for one in payload["subjects"]]
        found = self.run(context, self.params.model_validate(payload["params"]), subjects, report_progress)
        if not isinstance(found, Mapping):
            raise PermanentJobError(f"the kind {self.name} returned {type(found).__name__}, not dict")
        return found

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """Return the result of the task; see `Kind.publish`."""
        return dict(results[0])

    def _numbers(self, params: P) -> list[int]:
        return [getattr(params, name) for name in self.subjects]
