"""Conversions: prepare a plan, carry out batches of tasks on any executor, publish the target.

`Conversion.prepare` plans once. Batches run in any order, in this process (`Conversion.run`) or in others
(`dcp.conversion.running.run_batch`). `publish` makes the target visible. Stages in other processes receive
the plan as text (`encode`) and refuse a changed source. Stages may run on different machines.

Every stage may be repeated, even while an earlier attempt runs. Tasks write equal bytes to equal places, and
one rename or conditional request publishes the target.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from dcp.conversion.executors import run_all
from dcp.conversion.gather import TaskResult
from dcp.conversion.layout import (
    Copies,
    Hole,
    Literals,
    SourceColumns,
    TargetLayout,
    TaskCopies,
    TermColumns,
    copy_sources,
    sum_sources,
)
from dcp.conversion.local import LocalPublisher, stays
from dcp.conversion.merging import merge_entries, merge_origin
from dcp.conversion.publishing import Publisher, StoredPublisher
from dcp.conversion.running import (
    BatchSettings,
    FaultySumsError,
    ResultChecks,
    SourceChangedError,
    Task,
    TaskBatch,
    make_batches,
    make_tasks,
    run_batch,
    source_mark,
)
from dcp.conversion.targets.job import ConversionOptions, LayoutJob, Planned, TargetPlace
from dcp.inspection.entries import mapped_entries
from dcp.progress import ProgressCallback, reporting
from dcp.storage.commit_names import is_commit_object
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import Verify
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CorruptCheckpointError,
    OptionError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.opening import Source, complete_index, open_index
from dcp.storage.formats.registry import DCP, SAFETENSORS
from dcp.storage.packing import pack, unpack
from dcp.storage.stores.base import Closable

BATCH_BYTES: Final = 512 << 20
"""Bytes written by one batch of a job, large enough to hide the start of a process."""

_OF_A_RUN: Final = ("time", "dcphub_version")
"""Fields of the provenance of a ``dcp`` target that differ between equal conversions."""

_ATTEMPT: Final = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class ConversionReport:
    """The result of `dcp.convert` and `dcp.merge`.

    Attributes:
        files: Names of the files written to ``target``.
        tensor_count: Number of tensors of the output.
        bytes_written: Bytes of the output, headers included.
        bytes_read: Bytes read by this run.
        seconds: Durations of this run by phase, with "total".
        tasks: Number of independent tasks; ``tasks_resumed`` were done by an earlier run.
        blocks_verified: Blocks of the source with a verified checksum; ``blocks_unverified`` have no
            checksum.
        dropped_objects: Values that the target's format cannot hold.
        weights: Weights of a merge by source or adapter, in order.
        unmerged: Tensors of a merge that were copied from the first source.
        checksums: CRC-32 by tensor name of contiguous tensors in the target. A ``dcp`` target stores
            checksums in the manifest.
    """

    source: str
    target: str
    format: str
    files: tuple[str, ...] = ()
    tensor_count: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    tasks: int = 0
    tasks_resumed: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    dropped_objects: tuple[str, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    unmerged: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict, repr=False)


class Conversion(Closable):
    """Convert ``source``, which ``open_source`` opens in other processes, to ``target``.

    ``attempt`` consists of 16 hexadecimal digits, new for each preparation and equal in all later stages. An
    attempt never replaces an existing target, and its stages may run in several processes. Without
    ``attempt`` all stages use this object, and a ledger beside the target records finished work for
    ``resume``. Use as a context manager: after a failure, files that the next run cannot resume are removed.
    Raises the errors of `dcp.convert` and SourceChangedError.
    """

    def __init__(
        self,
        source: Source,
        target: TargetPlace,
        options: ConversionOptions,
        *,
        open_source: Callable[[], Source] | None = None,
        attempt: str = "",
        overwrite: bool = False,
        verify: Verify = "blocks",
        resume: bool = True,
    ) -> None:
        self._source, self._members = source, source.members or (source,)
        _refuse_itself(self._members, target)
        self._open_source = open_source or (lambda: source)
        self._options = options
        self.place, save_id = _of_attempt(target, attempt) if attempt else (target, uuid.uuid4().hex[:8])
        self._publisher = _publisher(self.place, save_id, overwrite=overwrite)
        self._engine = ReadEngine(source.store, complete_index(source.store, source.index), verify=verify)
        self._checks: ResultChecks | None = None
        self._resumes, self._has_progress = resume, False

    def __exit__(self, *exc: object) -> None:
        error, publisher = exc[1], self._publisher
        # After these errors nothing read so far can be trusted by a later run.
        is_wrong = isinstance(error, CorruptCheckpointError | SourceChangedError | FaultySumsError)
        # Completed files in a store stay, because another conversion may be writing the same files.
        is_useless = self.place.path is not None and not (self._resumes and self._has_progress)
        try:
            is_given_up = error is not None and (is_wrong or is_useless)
            if is_given_up and publisher.has_begun and not self.place.attempt:
                publisher.discard(0)
        finally:
            self.close()

    def close(self) -> None:
        """Close the ledger and the source's files."""
        self._publisher.close()
        self._engine.close()

    # -- the stages ------------------------------------------------------------------------------------------

    def prepare(self, *, batch_bytes: int = 0) -> tuple[Planned, list[TaskBatch]]:
        """Plan, reserve space where possible, and return the unfinished batches.

        Raises CheckpointConflictError if the target exists.
        """
        engine, publisher, by_file = self._engine, self._publisher, self.place.path is None
        mark = source_mark(engine.store, engine.index, self._options.to)
        planned, codes, sources, terms = self._plan(publisher.save_id)
        identity = _fingerprint(mark, planned.layout, sources, terms, by_file=by_file)
        layout, done = publisher.begin(
            planned.layout, identity + ("" if self._resumes else publisher.save_id)
        )
        tasks = make_tasks(engine.index, layout, codes, sources, terms, by_file=by_file)
        batches = make_batches(tasks, batch_bytes)
        planned = replace(
            planned,
            layout=layout,
            source_mark=mark,
            chunks=tuple(np.unique(sources.chunks).tolist()),
            batch_count=len(batches),
            inode=publisher.inode,
        )
        self._checks = ResultChecks(engine, layout.copies)
        left = dict(enumerate(batches))  # batches by number
        for result in done:
            left.pop(result.number, None)
            self._checks.take(replace(result, bytes_read=0))  # read by an earlier run
        self._has_progress = bool(done)
        if left and self.place.path is not None and not publisher.overwrite:
            # with unfinished work, an existing target is not the result of an earlier run
            self.place.refuse_existing()
        return planned, list(left.values())

    def _plan(self, save_id: str) -> tuple[Planned, npt.NDArray[np.uint8], SourceColumns, TermColumns | None]:
        """Lay out the selected entries of the source, with the arguments of `make_tasks`. Raises PlanError
        and MissingKeyError."""
        engine, options, place = self._engine, self._options, self.place
        if options.hf is not None and (options.to != SAFETENSORS.name or place.file_name is not None):
            raise OptionError("hf requires to='safetensors' and a folder as target, not a file")
        chosen: dict[str, Any] = {"only": options.only, "exclude": options.exclude}
        chosen |= {"rename": options.rename, "dtype": options.dtype}
        maps, arithmetic = options.weight_maps, options.arithmetic
        origin: dict[str, Any] = {}
        unmerged: tuple[str, ...] = ()
        added = None
        if arithmetic is None:
            weights = maps[0] if maps else None
            entries, mapped = mapped_entries(engine.index, engine.store, weights, **chosen)
        else:
            beside = options.hf.config if options.hf is not None else None
            merged = merge_entries(self._members, arithmetic, maps, config=beside, **chosen)
            entries, added, mapped, unmerged = merged
            origin = merge_origin(self._members, arithmetic)
        if any(maps):
            origin["map"] = ", ".join(dict.fromkeys(one.label for one in maps if one is not None))
        planned = LayoutJob(entries, engine, options, place.file_name, save_id, origin=origin).plan()
        copies, terms = planned.layout.copies, None
        if arithmetic is None or added is None:
            sources = copy_sources(engine, copies, mapped)
        else:
            sources, terms = sum_sources(engine, copies, added, arithmetic.code, mapped)
        return replace(planned, unmerged=unmerged), entries.index.dtype_codes, sources, terms

    def carry_out(
        self,
        source_mark: str,
        batches: list[TaskBatch],
        executor: str | Executor,
        workers: int | None,
        progress: bool | ProgressCallback | None,
    ) -> None:
        """Carry out ``batches`` with the chosen executor and record each batch in the ledger.

        Raises CorruptCheckpointError for checksums that differ.
        """
        is_shared = self._engine.store.capabilities.is_shared and self.place.store.capabilities.is_shared
        if not is_shared or (executor == "processes" and workers is None and len(batches) < 2):
            # the stores exist only in this process; or a single task, for which a process costs more than it
            # saves
            executor = "inline"
        settings, publisher, checks = self._settings(source_mark), self._publisher, self._checks
        engine = self._engine if executor == "inline" else None
        total = sum(map(attrgetter("size_bytes"), batches))
        with reporting(progress, "convert", total, show=True) as on_bytes:

            def take(batch: TaskBatch, result: TaskResult) -> None:
                publisher.append(result, batch)
                self._has_progress = True
                if checks is not None:
                    checks.take(result)
                if on_bytes is not None:
                    on_bytes(batch.size_bytes)

            function, before = partial(run_batch, settings, engine=engine), publisher.expect
            run_all(batches, function, take, executor=executor, workers=workers, before=before)

    def run(
        self, batch: TaskBatch, source_mark: str, on_bytes: Callable[[int], None] | None = None
    ) -> TaskResult:
        """Carry out one durable batch of an attempt, planned for the source of ``source_mark``. ``on_bytes``
        receives the size of each written window."""
        settings = self._settings(source_mark)
        settings.refuse_changed(self._engine, self._source.name)
        with self._publisher.noted(batch):
            return run_batch(settings, batch, self._engine, on_bytes)

    def _settings(self, source_mark: str) -> BatchSettings:
        engine, publisher, in_place = self._engine, self._publisher, self.place.path is not None
        facts = self._options.to, source_mark, engine.verify, publisher.output, in_place, publisher.overwrite
        return BatchSettings(self._open_source, engine.store, *facts)

    def publish(self, prepared: Planned, results: Iterable[TaskResult] = ()) -> ConversionReport:
        """Compare the last checksums and publish the target, unless an earlier attempt has.

        ``results`` are results not yet collected. Raises CheckpointConflictError for a foreign target.
        """
        engine, publisher, layout, checks = self._engine, self._publisher, prepared.layout, self._checks
        settings = self._settings(prepared.source_mark)
        if checks is None:  # another process made the plan
            settings.refuse_changed(engine, self._source.name)
            engine.resolve(prepared.chunks)
            checks = ResultChecks(engine, layout.copies)
        for result in results:
            checks.take(result)
        checks.finish(prepared.chunks if engine.verify != "none" else ())
        checks.check_complete()
        if engine.verify == "none" or checks.stats.blocks_unverified:
            # Without checksums, check that files were not replaced: the result could mix two versions.
            settings.refuse_changed(engine, self._source.name)
        publisher.publish(layout, checks, prepared.inode)
        publisher.clear(prepared.batch_count)
        return self._report(prepared, checks, tasks=prepared.batch_count)

    # -- one that was finished -------------------------------------------------------------------------------

    def of_finished(self) -> ConversionReport | None:
        """Return the report on an existing target with the bytes this conversion would write, else None.
        Writes nothing."""
        engine, place, to, there = self._engine, self.place, self._options.to, None
        save_id = self._publisher.save_id
        if to == DCP.name:
            try:
                there = open_index(place.store)
            except CheckpointError:
                return None
            save_id = str(there.provenance.get("save_id"))
        planned, codes, sources, terms = self._plan(save_id)
        layout, inode = planned.layout, place.path.stat().st_ino if place.path is not None else None
        is_there = _publisher(place, save_id, overwrite=False).is_published(layout, inode)
        if not is_there or _lasting(layout.index) != _lasting(there):
            return None
        tasks = make_tasks(engine.index, layout, codes, sources, terms, by_file=True)
        checks = ResultChecks(engine, layout.copies)
        # Files that exist are compared, not written.
        settings = replace(self._settings(""), output=place.store, in_place=False)
        for batch in make_batches(tasks, 0):
            try:
                checks.take(run_batch(settings, batch, engine))
            except CheckpointConflictError:
                return None
        return self._report(planned, checks, tasks=len(tasks), tasks_resumed=len(tasks))

    def _report(self, planned: Planned, checks: ResultChecks, **facts: Any) -> ConversionReport:
        layout, index, stats = planned.layout, planned.layout.index, checks.stats
        return ConversionReport(
            source=self._source.name,
            target=self.place.url,
            format=self._options.to,
            files=(*layout.file_names, *layout.last_files),
            tensor_count=len(layout.tensor_copies) if index is None else index.tensor_count,
            bytes_read=checks.bytes_read,
            bytes_written=sum(layout.file_sizes),
            blocks_verified=stats.blocks_verified,
            blocks_unverified=stats.blocks_unverified,
            dropped_objects=planned.dropped,
            unmerged=planned.unmerged,
            checksums={fqn: checks.whole(copy) for fqn, copy in layout.tensor_copies.items()},
            **facts,
        )


def _publisher(place: TargetPlace, save_id: str, *, overwrite: bool) -> Publisher:
    kind = StoredPublisher if place.path is None else LocalPublisher
    return kind(place, save_id, overwrite=overwrite)


def _lasting(index: CheckpointIndex | None) -> bytes | None:
    """Return tensors, values and their places as bytes for a comparison."""
    if index is None:
        return None
    index = replace(
        index,
        provenance={key: value for key, value in index.provenance.items() if key not in _OF_A_RUN},
        crc_start=np.zeros(len(index.crc_start), np.int64),
        crcs=np.zeros(0, np.uint32),
        digests=(),
        torch_metadata_crc=None,
    )
    return encode_manifest(index)


def _of_attempt(target: TargetPlace, attempt: str) -> tuple[TargetPlace, str]:
    """Return the place of an attempt and the save id of its ``dcp`` target."""
    if not _ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt: must be 16 hexadecimal digits, not {attempt!r}")
    return replace(target, attempt=attempt), hashlib.sha256(attempt.encode()).hexdigest()[:8]


def discard_attempt(target: TargetPlace, attempt: str, batches: int) -> None:
    """Remove the files written by an abandoned conversion of ``batches`` batches; needs no source.

    Published targets and objects of other attempts stay.
    """
    _publisher(*_of_attempt(target, attempt), overwrite=False).discard(batches)


# -- the plan ------------------------------------------------------------------------------------------------


def _refuse_itself(members: Sequence[Source], place: TargetPlace) -> None:
    """Raise OptionError if ``place`` is the source or a file of the source."""
    real = place.store.url if place.path is None else os.path.realpath(place.store.url)
    for member in members:
        if member.store.url != place.store.url and os.path.realpath(member.store.url) != real:
            continue
        if member.file == place.file_name:
            problem = f"source and target are both {place.url}"
        elif place.file_name in member.index.files or is_commit_object(place.file_name or ""):
            problem = f"{place.url} is a file of the source"
        elif place.file_name is None and (member.file is None or not stays(member.file)):
            problem = f"a checkpoint in {place.url} would replace the source file {member.name}"
        else:
            continue
        raise OptionError(f"{problem}; choose another target", path=place.url)


def _fingerprint(
    mark: str, layout: TargetLayout, sources: SourceColumns, terms: TermColumns | None, *, by_file: bool
) -> str:
    """Return a text, equal for runs that write equal bytes from a source of this ``mark``."""
    digest = hashlib.sha256(f"{mark} {by_file} {terms and terms.accumulate}".encode())
    copies, literals = layout.copies, layout.literals
    columns: list[npt.ArrayLike] = [layout.file_sizes, list(map(crc32, literals.data))]
    columns += [literals.files, literals.offsets, copies.tensors, copies.dtype_codes, copies.files]
    columns += [copies.offsets, copies.size_bytes, *vars(sources).values()]
    if terms is not None:
        columns += [terms.start, terms.weights.view(np.int64), terms.ranks, terms.widths, terms.codes]
    for column in columns:
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    return digest.hexdigest()


T = TypeVar("T")

_KINDS: Final = (Planned, TaskBatch, Task, TaskCopies, SourceColumns, TermColumns, TargetLayout, Copies)
_INDEX, _RESULT = -1, -2
_UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError)
_DAMAGED: Final = "the plan of a conversion, or the result of a task, is damaged"
_LEFT_OUT: Final = ("literals", "replaced")
"""Fields of a layout that publishing does not need."""


def encode(value: Planned | TaskBatch | TaskResult) -> str:
    """Encode a plan (without literals), a batch or a result as text; `decode` is the inverse."""
    return base64.b64encode(zlib.compress(pack(_packed(value)))).decode("ascii")


def decode(text: str, kind: type[T]) -> T:
    """Decode an object of ``kind`` from `encode`'s text. Raises CheckpointFormatError for invalid text."""
    try:
        found = _restored(unpack(zlib.decompress(base64.b64decode(text))))
    except (*_UNREADABLE, zlib.error) as error:
        raise CheckpointFormatError(_DAMAGED) from error
    if not isinstance(found, kind):
        raise CheckpointFormatError(_DAMAGED)
    return found


def _packed(value: Any) -> Any:
    """Return plain data and arrays; objects are dicts with the key None."""
    if isinstance(value, np.ndarray):
        return np.diff(value, axis=0, prepend=np.int64(0)) if value.dtype.kind == "i" else value
    if isinstance(value, CheckpointIndex):
        return {None: (_INDEX, encode_manifest(value, is_checked=True))}
    if isinstance(value, TaskResult):
        return {None: (_RESULT, value.encode())}
    if isinstance(value, tuple | list):
        return [_packed(one) for one in value]
    if not isinstance(value, _KINDS):
        return dict(value) if isinstance(value, Mapping) else value
    names = [one.name for one in fields(value)]
    if isinstance(value, TargetLayout):
        names = [name for name in names if name not in _LEFT_OUT]
    return {None: (_KINDS.index(type(value)), {name: _packed(getattr(value, name)) for name in names})}


def _restored(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.cumsum(value, axis=0) if value.dtype.kind == "i" else value
    if isinstance(value, tuple):
        return tuple(map(_restored, value))
    if not isinstance(value, dict) or None not in value:
        return value
    number, own = value[None]
    if number < 0:
        return decode_manifest(own) if number == _INDEX else TaskResult.decode(own)
    kind: Any = _KINDS[number]
    own = {name: _restored(one) for name, one in own.items()}
    if kind is TargetLayout:
        own["literals"] = Literals.of([])
    if kind in (TargetLayout, Task):
        own["holes"] = tuple(Hole(*hole) for hole in own["holes"])
    return kind(**own)
