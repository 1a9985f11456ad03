"""Conversions (kind ``convert``): a checkpoint in another format under a root. Each task is a batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from sqlalchemy import Connection, select, update

from dcp.server.catalog import audit
from dcp.server.catalog.changes import upsert_checkpoint
from dcp.server.catalog.events import emit
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.runs import root_id
from dcp.server.catalog.source_facts import facts_of_source
from dcp.server.core.allowances import SERVICE
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, PermanentJobError, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.jobs.ledger.transitions import submit_behind
from dcp.server.core.jobs.subjects import Subject, find_subject, open_source, storage_errors
from dcp.server.core.problems import ConflictError, ForbiddenError, NotFoundError, UnprocessableError
from dcp.server.core.roots import StorageRoot, check_key
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.database.tables import checkpoints, roots
from dcp.server.features.convert.options import ConvertParams, TargetParams
from dcp.server.features.lineage import LineageKind, add_lineage
from dcp.server.features.scan import ScanKind
from dcp.server.records.jobs import Job
from dcp.storage.errors import PlanError

if TYPE_CHECKING:
    from dcp.conversion.driver import Conversion
    from dcp.conversion.hf_folder import HfFolder
    from dcp.conversion.targets.job import TargetPlace
    from dcp.storage.formats.opening import Source

_MAX_LISTED: Final = 100

T = TypeVar("T", bound=TargetParams)


def _attempt_of(name: str) -> str:
    """Return the conversion's name for an attempt at the plan."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def target_dedup_key(root: str, key: str) -> str:
    """Return a key that allows one conversion per target at a time."""
    return f"convert:{hashlib.sha256(f'{root}/{key}'.encode()).hexdigest()[:40]}"


class TargetKind(Kind[T]):
    """Jobs that make a checkpoint from others. The plan prepares files, each task copies a batch, and a
    rename or conditional request publishes. ``lineage``: relation to the sources; ``done``: audit action."""

    scope: ClassVar[Scope] = "convert"
    lineage: ClassVar[LineageKind] = "converted_from"
    done: ClassVar[str] = "checkpoint.convert"
    preload: ClassVar[tuple[str, ...]] = ("dcp.conversion.driver",)
    leaves_plans: ClassVar[bool] = True  # create files in full size at once, to detect a full disk early

    @classmethod
    def dedup_key(cls, params: T) -> str:
        """As `Kind.dedup_key`: one conversion or merge per target at a time."""
        return target_dedup_key(params.target_root or "", params.target_key)

    def open(self, context: JobContext, subjects: Sequence[Subject]) -> tuple[list[StorageRoot], Source]:
        """Open the subjects as one source; also return their roots."""
        (subject,) = subjects
        root, source = open_source(context, subject)
        return [root], source

    def subjects(
        self, connection: Connection, params: T, visible: frozenset[str] | None = None
    ) -> list[Subject]:
        """Return the committed and ``visible`` source checkpoints. Raises MissingError, StateError."""
        return [find_subject(connection, number, visible) for number in params.source_ids]

    def made_of(self, subjects: Sequence[Subject], params: T) -> list[Json]:
        """Return the sources for the result; empty if the parameters contain them."""
        return []

    def prepare(self, connection: Connection, params: T) -> Json:
        """As `Kind.prepare`."""
        return {"subjects": [one.to_json() for one in self.subjects(connection, params)]}

    def specify(self, connection: Connection, params: T, caller: Principal, settings: Settings) -> JobSpec:
        """As `Kind.specify`."""
        reader = caller.having("read")  # roots of the sources; the target root needs the scope of the kind
        subjects = self.subjects(connection, params, reader.roots)
        subject = subjects[0]
        target_root = _target_root(params.target_root or subject.root, caller, settings)
        if settings.roots[target_root].readonly:
            raise ForbiddenError(f"root {target_root} is read-only")
        check_key(params.target_key)
        template = _template_place(params, subject.root, reader, settings)
        for one in subjects:
            if target_root == one.root and f"{params.target_key}/".startswith(f"{one.key}/"):
                raise UnprocessableError("the target is inside the source", field="target_key")
        refuse_known(connection, target_root, params.target_key)
        return self.new_job(
            params.model_copy(update={"target_root": target_root, **template}),
            caller.name,
            root=target_root,
            checkpoint_id=subject.id,
            subjects=[one.id for one in subjects],
            other_roots=list(template.values()),
        )

    def plan(self, context: JobContext, params: T) -> JobPlan:
        """As `Kind.plan`."""
        from dcp.conversion import driver
        from dcp.conversion.driver import BATCH_BYTES

        self.clear_plans(context, params)
        shared: dict[str, Any] = {
            "params": params.model_dump(mode="json"),
            "subjects": context.prepared["subjects"],
            "attempt": _attempt_of(context.attempt_name),
        }
        with self._conversion(context, shared, template=_template(context, params)) as conversion:
            prepared, batches = conversion.prepare(batch_bytes=BATCH_BYTES)
        shared["source_mark"] = prepared.source_mark
        specs = [
            TaskSpec(payload={"batch": driver.encode(batch)}, weight_bytes=batch.size_bytes)
            for batch in batches
        ]
        plan_data = {"shared": shared, "prepared": driver.encode(prepared), "batches": prepared.batch_count}
        return JobPlan(tasks=specs, plan_data=plan_data)

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        from dcp.conversion import driver
        from dcp.conversion.running import TaskBatch

        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            report_progress(done)

        with self._conversion(context, payload) as conversion:
            batch = driver.decode(payload["batch"], TaskBatch)
            result = conversion.run(batch, payload["source_mark"], on_bytes)
        return {"result": driver.encode(result)}

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        from dcp.conversion import driver
        from dcp.conversion.gather import TaskResult
        from dcp.conversion.targets.job import Planned

        shared = plan_data["shared"]
        params = self.params.model_validate(shared["params"])
        prepared = driver.decode(plan_data["prepared"], Planned)
        with self._conversion(context, shared) as conversion:
            done = (driver.decode(result["result"], TaskResult) for result in results)
            report = conversion.publish(prepared, done)
        root, key = _root(context, params), params.target_key
        # a scan reads the structure
        facts = facts_of_source(root.name, key, root.source(key), observed_seconds=time.time())
        return {
            "root": root.name,
            "key": key,
            "format": params.to,
            "files": list(report.files[:_MAX_LISTED]),
            "file_count": len(report.files),
            "tensor_count": report.tensor_count,
            "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written,
            "blocks_verified": report.blocks_verified,
            "blocks_unverified": report.blocks_unverified,
            "dropped_objects": list(report.dropped_objects[:_MAX_LISTED]),
            "map": _map_label(params),
            **({"unmerged": list(report.unmerged[:_MAX_LISTED])} if report.unmerged else {}),
            **({"sources": sources} if (sources := self.made_of(_subjects(shared), params)) else {}),
            "target": {name: getattr(facts, name) for name in _FACTS},
        }

    def discard(self, context: JobContext, plan_data: Json) -> None:
        """As `Kind.discard`."""
        from dcp.conversion.driver import discard_attempt

        if "shared" not in plan_data:
            return
        shared, batches = plan_data["shared"], plan_data.get("batches", 0)
        params = self.params.model_validate(shared["params"])
        root = _root(context, params)
        with storage_errors(root):
            discard_attempt(_target(root, params), shared["attempt"], batches)

    def clear_plans(self, context: JobContext, params: T) -> None:
        """As `Kind.clear_plans`."""
        from dcp.conversion.driver import discard_attempt

        root = _root(context, params)
        with storage_errors(root), suppress(PlanError):  # no attempt has written if the target is impossible
            target = _target(root, params)
            for name in context.earlier_attempts if target.path is not None else ():
                discard_attempt(target, _attempt_of(name), 0)

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """As `Kind.record`: register the target with its sources, and submit a scan of its structure. A
        target without a step gets the step of the first source."""
        params = self.params.model_validate(job.params)
        source_ids = [one["id"] for one in result.get("sources", ())] or params.source_ids
        now, root, key = time.time(), result["root"], result["key"]
        query = select(checkpoints.c.id, checkpoints.c.step).where(checkpoints.c.id.in_(source_ids))
        steps = {row.id: row.step for row in connection.execute(query)}
        facts = CheckpointFacts(root=root, key=key, tags=frozenset(params.tags), **result["target"])
        if facts.step is None:
            facts = replace(facts, step=steps.get(source_ids[0]))
        owner = None if job.owner.startswith(SERVICE) else job.owner
        facts = replace(facts, registered_by=job.created_by, owner=owner)
        target = upsert_checkpoint(connection, facts, now=now, actor=job.created_by).id
        # no fingerprint: the scan opens the target and reads the structure
        without_structure = (checkpoints.c.id == target) & checkpoints.c.structure_id.is_(None)
        connection.execute(update(checkpoints).where(without_structure).values(fingerprint=None))
        label = result.get("map")
        for source_id in steps:
            add_lineage(connection, target, source_id, kind=self.lineage, job_id=job.id, map=label, now=now)
        several = {"sources": list(source_ids)} if len(source_ids) > 1 else {}
        detail = {"root": root, "key": key, "from": source_ids[0], **several, "job": job.id}
        if label:
            detail["map"] = label
        audit.record(connection, job.created_by, self.done, f"checkpoint:{target}", detail, now=now)
        # not a running scan: it can have listed the folder before the target existed
        submit_behind(connection, ScanKind.of_folder(root, facts.run_key), now)
        emit(
            connection,
            "checkpoint.converted",
            root_id=root_id(connection, root),
            checkpoint_id=target,
            data={
                "root": root,
                "run": facts.run_key,
                "key": key,
                "step": facts.step,
                "format": facts.format,
                "source_id": source_ids[0],
                "job_id": job.id,
            },
            now=now,
        )

    @contextmanager
    def _conversion(
        self, context: JobContext, shared: Mapping[str, Any], *, template: HfFolder | None = None
    ) -> Iterator[Conversion]:
        """Yield the conversion of the plan, tasks, and publication; ``template`` is for the plan only."""
        from dcp.conversion.driver import Conversion

        params = self.params.model_validate(shared["params"])
        options = params.options().with_hf(template)
        root = _root(context, params)
        roots, source = self.open(context, _subjects(shared))
        target, attempt = _target(root, params), shared["attempt"]
        with (
            storage_errors(root, *roots),
            Conversion(source, target, options, attempt=attempt) as conversion,
        ):
            yield conversion


class ConvertKind(TargetKind[ConvertParams]):
    """Conversion of one checkpoint."""

    name: ClassVar[str] = "convert"
    about: ClassVar[str] = "Convert a checkpoint to another format."
    params = ConvertParams


def _subjects(shared: Mapping[str, Any]) -> list[Subject]:
    return [Subject(**one) for one in shared["subjects"]]


def _map_label(params: TargetParams) -> str | None:
    """Return the name of the map in the catalog."""
    if params.map is None:
        return None
    name = params.map if isinstance(params.map, str) else str(params.map.get("name") or "given")
    return f"{name[:200]} (inverse)" if params.inverse else name[:200]


def _root(context: JobContext, params: TargetParams) -> StorageRoot:
    root = _configured(context, params.target_root)
    if root.readonly:
        raise PermanentJobError(f"root {root.name} is read-only")
    return root


def _configured(context: JobContext, name: str | None) -> StorageRoot:
    if name is None or name not in context.roots:
        raise PermanentJobError(f"root {name} is no longer configured")
    return context.roots.get(name)


def _template_place(
    params: TargetParams, own_root: str, caller: Principal, settings: Settings
) -> dict[str, str]:
    """Return the root of the template, if any. Raises NotFoundError if the root is not visible to the
    caller."""
    if params.hf_key is None:
        return {}
    check_key(params.hf_key)
    return {"hf_root": _visible(params.hf_root or own_root, caller, settings)}


def _target_root(root: str, caller: Principal, settings: Settings) -> str:
    """Return the root of the target. Raises NotFoundError if the root is not visible, ForbiddenError if it is
    read-only for the caller."""
    _visible(root, caller.having("read"), settings)
    if not caller.may_see(root):
        raise ForbiddenError(f"the scope 'convert' is required in root {root}", scope="convert")
    return root


def _visible(root: str, caller: Principal, settings: Settings) -> str:
    if not caller.may_see(root) or root not in settings.roots:
        raise NotFoundError(f"root {root!r} not found")
    return root


def _template(context: JobContext, params: TargetParams) -> HfFolder | None:
    """Return files beside the weights, read once by the plan."""
    from dcp.conversion.hf_folder import hf_folder_of

    if params.hf_key is None:
        return None
    root = _configured(context, params.hf_root)
    with storage_errors(root):
        return hf_folder_of(
            root.store(params.hf_key), params.hf_also or (), root.folder_opener(params.hf_key)
        )


def _target(root: StorageRoot, params: TargetParams) -> TargetPlace:
    from dcp.conversion.targets.job import place_of

    return place_of(root.url_of(params.target_key), params.to, root.open_store)


# -- targets of conversions in the catalog -------------------------------------------------------------------


_FACTS: Final = (
    "format",
    "committed_seconds",
    "step",
    "save_id",
    "fingerprint",
    "bytes",
    "file_count",
    "observed_seconds",
)
_LIVING: Final = ("committed", "unreadable", "incomplete", "deleted")


def refuse_known(connection: Connection, root: str, key: str) -> None:
    """Raise ConflictError if the catalog has a checkpoint at, above, or below the target."""
    parts = key.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    query = (
        select(checkpoints.c.key, checkpoints.c.state)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(roots.c.name == root, checkpoints.c.key.in_(above), checkpoints.c.state.in_(_LIVING))
    )
    found = connection.execute(query).first()
    if found is not None:
        raise ConflictError(
            f"{root}:{found.key} is already a checkpoint ({found.state}); choose another target_key",
            key=found.key,
        )
