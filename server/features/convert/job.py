"""``convert``: a checkpoint in another format, under a root; each task is a batch of the conversion's."""

from __future__ import annotations

import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import Field, model_validator
from sqlalchemy import Connection, select

from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.formats import TargetFormat, fault_of_target_name
from dcp.server.catalog.lineage import LineageKind
from dcp.server.catalog.source_facts import facts_of_source
from dcp.server.core.inputs import Name
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, PermanentJobError, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.states import JobRow, JobSpec, Json
from dcp.server.core.jobs.parameters import CheckpointId, Globs, Parameters, PlainText
from dcp.server.core.jobs.subjects import Subject, find_subject, open_source, storage_errors
from dcp.server.core.problems import ConflictError, ForbiddenError, NotFoundError, UnprocessableError
from dcp.server.core.roots import StorageRoot, check_key
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.database.tables import checkpoints, roots
from dcp.server.features.convert.renaming import BoundedRename, check_sets
from dcp.server.features.convert.targets import record_target
from dcp.server.features.convert.weight_maps import MapData, check_map, map_of
from dcp.storage.errors import PlanError
from dcp.storage.formats.dtypes import check_castable
from dcp.storage.formats.registry import SAFETENSORS, target_named

if TYPE_CHECKING:  # imported where they are needed: the API process only makes such jobs
    from dcp.conversion.driver import Conversion
    from dcp.conversion.hf_folder import HfFolder
    from dcp.conversion.targets.job import ConversionOptions, TargetPlace
    from dcp.storage.formats.opening import Source

__all__ = [
    "ConvertKind",
    "ConvertOptions",
    "ConvertParams",
    "TargetKind",
    "TargetParams",
    "target_dedup_key",
]

_MAX_LISTED: Final = 100
_LIVING: Final = ("committed", "unreadable", "incomplete", "deleted")

Size = Annotated[int, Field(ge=0, le=1 << 40)]


class ConvertOptions(Parameters):
    """What `dcp.convert` takes. ``target_root`` None is the source's own; ``tags`` are for the target.

    ``map`` is the name of a ready weight map, or one's data; ``inverse``, ``below``, ``config`` (the content
    of a model's ``config.json``, if it is not beside the source) and ``sizes`` are about it, as for
    `dcp.weight_map`. The folder ``hf_key`` of ``hf_root`` (the source's, if it is None) has what
    ``from_pretrained`` needs besides weights, as ``hf`` and ``hf_also`` of `dcp.convert`.
    """

    to: TargetFormat
    target_root: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    only: Globs | None = None
    exclude: Globs | None = None
    rename: (
        Annotated[dict[PlainText, Annotated[str, Field(max_length=1024)]], Field(max_length=64)] | None
    ) = None
    map: PlainText | MapData | None = None
    inverse: bool = False
    below: PlainText | None = None
    config: MapData | None = None
    sizes: Annotated[dict[PlainText, Size], Field(max_length=64)] | None = None
    dtype: PlainText | Annotated[dict[PlainText, PlainText], Field(max_length=256)] | None = None
    shard_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] | None = None
    files: Annotated[int, Field(ge=1, le=4096)] = 1
    chunks: Literal["keep", "split"] = "keep"
    drop_objects: bool = False
    hf_key: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    hf_root: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    hf_also: Globs | None = None
    tags: Annotated[tuple[Name, ...], Field(max_length=32, strict=False)] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name in [self.dtype] if isinstance(self.dtype, str) else (self.dtype or {}).values():
            try:
                check_castable(name)
            except PlanError as error:
                raise ValueError(str(error)) from None
        check_map(self.map, self.config, self.sizes, inverse=self.inverse, below=self.below)
        check_sets(self.rename or {})
        if self.hf_key is not None and self.to != SAFETENSORS.name:
            raise ValueError("hf_key: only folders of safetensors have files of Hugging Face beside weights")
        if self.hf_root is not None and self.hf_key is None:
            raise ValueError("hf_root is about hf_key, which is missing")
        if self.hf_also is not None and self.hf_key is None:
            raise ValueError("hf_also is about hf_key, which is missing")
        for pattern, replacement in (self.rename or {}).items():
            try:
                _with_its_groups(re.compile(pattern)).sub(replacement, "")
            except (re.error, IndexError, OverflowError, RecursionError) as error:
                raise ValueError(f"rename: {pattern[:100]!r} is no regular expression: {error}") from None
        return self

    def options(self) -> ConversionOptions:
        """The options of the conversion."""
        from dcp.conversion.targets.job import ConversionOptions

        rename = None if self.rename is None else BoundedRename(self.rename)
        weights = map_of(self.map, self.config, self.sizes, inverse=self.inverse, below=self.below)
        maps = () if weights is None else (weights,)
        return ConversionOptions(
            self.to,
            files=self.files,
            chunks=self.chunks,
            shard_bytes=self.shard_bytes,
            drop_objects=self.drop_objects,
            only=self.only,
            exclude=self.exclude,
            rename=rename,
            dtype=self.dtype,
            weight_maps=maps,
        )


def _with_its_groups(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """An expression that matches at once, to try a replacement with: the caller's own may take for ever also
    on an empty text, where nothing interrupts it."""
    names = {number: name for name, number in pattern.groupindex.items()}
    groups = (
        f"(?P<{names[number]}>)" if number in names else "()" for number in range(1, pattern.groups + 1)
    )
    return re.compile("".join(groups))


class TargetParams(ConvertOptions, ABC):
    """And the key of what is made, where nothing may be yet.

    ``target_key`` ends in ``.pt`` or another suffix of torch.save files for "torch", in ``.safetensors`` for
    one file of "safetensors"; without a suffix it is a folder, of shards for "safetensors".
    """

    target_key: Annotated[str, Field(min_length=1, max_length=1024)]

    @property
    @abstractmethod
    def source_ids(self) -> Sequence[int]:
        """The checkpoints that it is made of; the first one's root is that of the target, unless another is
        said."""

    @model_validator(mode="after")
    def _found_again(self) -> Self:
        fault = fault_of_target_name(target_named(self.to)[0], self.target_key.lower())
        if any(part.startswith(".") and part.strip(".") for part in self.target_key.split("/")):
            fault = "no part may begin with '.': scans pass over what is hidden, so the result would be lost"
        if fault is not None:
            raise ValueError(f"target_key: {fault}")
        return self


class ConvertParams(TargetParams):
    """A checkpoint of the catalog, and what is made of it."""

    checkpoint_id: CheckpointId

    @property
    def source_ids(self) -> Sequence[int]:
        """That one."""
        return (self.checkpoint_id,)


T = TypeVar("T", bound=TargetParams)


def _attempt_of(name: str) -> str:
    """The conversion's own name for the attempt at the job's plan."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def target_dedup_key(root: str, key: str) -> str:
    """One conversion to a target at a time."""
    return f"convert:{hashlib.sha256(f'{root}/{key}'.encode()).hexdigest()[:40]}"


class TargetKind(Kind[T]):
    """Makes a checkpoint of others: prepared in the plan, a batch a task, published by one rename or one
    conditional request. ``lineage`` is what its sources are to it, ``done`` what the audit log calls it."""

    scope: ClassVar[Scope] = "convert"
    lineage: ClassVar[LineageKind] = "converted_from"
    done: ClassVar[str] = "checkpoint.convert"
    preload: ClassVar[tuple[str, ...]] = ("dcp.conversion.driver",)
    leaves_plans: ClassVar[bool] = True  # files of the target's size, so that a full disk shows at once

    @abstractmethod
    def open(self, context: JobContext, subject: Json) -> tuple[list[StorageRoot], Source]:
        """The roots and the source of what `prepare` returned."""

    def subjects(
        self, connection: Connection, params: T, visible: frozenset[str] | None = None
    ) -> list[Subject]:
        """The checkpoints that the target is made of, which must be committed, and ``visible``. Raises
        MissingError, StateError."""
        return [find_subject(connection, number, visible) for number in params.source_ids]

    def made_of(self, subject: Json, params: T) -> list[Json]:
        """What the result says of the sources, of what `prepare` returned; nothing where the job does."""
        return []

    def specify(self, connection: Connection, params: T, caller: Principal, settings: Settings) -> JobSpec:
        """As `Kind.specify`."""
        subjects = self.subjects(connection, params, caller.roots)
        subject = subjects[0]
        target_root = params.target_root or subject.root
        if not caller.may_see(target_root) or target_root not in settings.roots:
            raise NotFoundError(f"there is no root {target_root!r}")
        if settings.roots[target_root].readonly:
            raise ForbiddenError(f"root {target_root} is read-only")
        check_key(params.target_key)
        updates = {"target_root": target_root, **_template_place(params, subject.root, caller, settings)}
        for one in subjects:
            if target_root == one.root and f"{params.target_key}/".startswith(f"{one.key}/"):
                raise UnprocessableError("the target is in the source itself", field="target_key")
        _refuse_known(connection, target_root, params.target_key)
        return JobSpec(
            kind=self.name,
            params=params.model_copy(update=updates).model_dump(mode="json"),
            created_by=caller.name,
            root=target_root,
            checkpoint_id=subject.id,
            subjects=[one.id for one in subjects],
            dedup_key=target_dedup_key(target_root, params.target_key),
            max_attempts=self.max_attempts,
        )

    def plan(self, context: JobContext, params: T) -> JobPlan:
        """As `Kind.plan`."""
        from dcp.conversion import driver
        from dcp.conversion.driver import BATCH_BYTES

        self.clear_plans(context, params)
        shared: dict[str, Any] = {
            "params": params.model_dump(mode="json"),
            "subject": dict(context.prepared),
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
        params, subject = self.params.model_validate(shared["params"]), shared["subject"]
        prepared = driver.decode(plan_data["prepared"], Planned)
        with self._conversion(context, shared) as conversion:
            done = (driver.decode(result["result"], TaskResult) for result in results)
            report = conversion.publish(prepared, done)
        root = _root(context, params)
        return {
            "root": root.name,
            "key": params.target_key,
            "format": params.to,
            "files": list(report.files[:_MAX_LISTED]),
            "file_count": len(report.files),
            "tensor_count": report.tensor_count,
            "bytes_read": report.bytes_read,
            "bytes_written": report.bytes_written,
            "blocks_verified": report.blocks_verified,
            "blocks_unverified": report.blocks_unverified,
            "dropped_objects": list(report.dropped_objects[:_MAX_LISTED]),
            "map": _map_told(params),
            **({"unmerged": list(report.unmerged[:_MAX_LISTED])} if report.unmerged else {}),
            **({"sources": sources} if (sources := self.made_of(subject, params)) else {}),
            "target": _facts_document(root, params.target_key),
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
        with storage_errors(root), suppress(PlanError):  # what is no place for a target has nothing either
            target = _target(root, params)
            for name in context.earlier_attempts if target.path is not None else ():
                discard_attempt(target, _attempt_of(name), 0)

    def record(self, connection: Connection, job: JobRow, result: Json) -> None:
        """As `Kind.record`."""
        params = self.params.model_validate(job.params)
        sources = [one["id"] for one in result.get("sources", ())] or params.source_ids
        record_target(connection, job, sources, self.lineage, self.done, params.tags, result)

    @contextmanager
    def _conversion(
        self, context: JobContext, shared: Mapping[str, Any], *, template: HfFolder | None = None
    ) -> Iterator[Conversion]:
        """The conversion that plan, tasks and publishing share; the plan alone needs a ``template``."""
        from dcp.conversion.driver import Conversion

        params = self.params.model_validate(shared["params"])
        options = params.options().with_hf(template)
        root = _root(context, params)
        roots, source = self.open(context, shared["subject"])
        target, attempt = _target(root, params), shared["attempt"]
        with (
            storage_errors(root, *roots),
            Conversion(source, target, options, attempt=attempt) as conversion,
        ):
            yield conversion


class ConvertKind(TargetKind[ConvertParams]):
    """Of one checkpoint."""

    name: ClassVar[str] = "convert"
    params = ConvertParams

    def prepare(self, connection: Connection, params: ConvertParams) -> Json:
        """As `Kind.prepare`."""
        return find_subject(connection, params.checkpoint_id).to_json()

    def open(self, context: JobContext, subject: Json) -> tuple[list[StorageRoot], Source]:
        """As `TargetKind.open`."""
        root, source = open_source(context, Subject(**subject))
        return [root], source


def _map_told(params: TargetParams) -> str | None:
    """What of the map the catalog notes."""
    if params.map is None:
        return None
    name = params.map if isinstance(params.map, str) else str(params.map.get("name") or "given")
    return f"{name[:200]} (inverse)" if params.inverse else name[:200]


def _refuse_known(connection: Connection, root: str, key: str) -> None:
    """ConflictError if the catalog knows something there, or a checkpoint that it would be inside of."""
    parts = key.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    query = (
        select(checkpoints.c.key, checkpoints.c.state)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(roots.c.name == root, checkpoints.c.key.in_(above), checkpoints.c.state.in_(_LIVING))
    )
    found = connection.execute(query).first()
    if found is not None:
        raise ConflictError(f"{root}:{found.key} is a checkpoint already ({found.state})", key=found.key)


def _root(context: JobContext, params: TargetParams) -> StorageRoot:
    name = params.target_root or ""
    if name not in context.roots:
        raise PermanentJobError(f"root {name} is not configured any more")
    root = context.roots.get(name)
    if root.readonly:
        raise PermanentJobError(f"root {name} is read-only")
    return root


def _template_place(
    params: TargetParams, own_root: str, caller: Principal, settings: Settings
) -> dict[str, str]:
    """The root of the template, if there is one. Raises NotFoundError where the caller sees none."""
    if params.hf_key is None:
        return {}
    root = params.hf_root or own_root
    if not caller.may_see(root) or root not in settings.roots:
        raise NotFoundError(f"there is no root {root!r}")
    check_key(params.hf_key)
    return {"hf_root": root}


def _template(context: JobContext, params: TargetParams) -> HfFolder | None:
    """What stands beside the weights, which is read once, when the conversion is planned."""
    from dcp.conversion.hf_folder import hf_folder_of

    if params.hf_key is None:
        return None
    name = params.hf_root or ""
    if name not in context.roots:
        raise PermanentJobError(f"root {name} is not configured any more")
    root = context.roots.get(name)
    with storage_errors(root):
        return hf_folder_of(
            root.store(params.hf_key), params.hf_also or (), root.folder_opener(params.hf_key)
        )


def _target(root: StorageRoot, params: TargetParams) -> TargetPlace:
    from dcp.conversion.targets.job import place_of

    return place_of(root.url_of(params.target_key), params.to, root.open_store)


def _facts_document(root: StorageRoot, key: str) -> dict[str, Any]:
    """What the catalog notes at once; the structure is left to a scan."""
    facts: CheckpointFacts = facts_of_source(root.name, key, root.source(key), observed_seconds=time.time())
    return {
        "format": facts.format,
        "committed_seconds": facts.committed_seconds,
        "step": facts.step,
        "save_id": facts.save_id,
        "fingerprint": facts.fingerprint,
        "bytes": facts.bytes,
        "file_count": facts.file_count,
        "observed_seconds": facts.observed_seconds,
    }
