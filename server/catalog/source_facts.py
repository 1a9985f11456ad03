"""Facts of a checkpoint from its index and file listing. Pure functions that open nothing.

Foreign data is clamped to the range of the catalog: steps of a hundred digits, NaN metrics and times outside
of the calendar occur in files of unknown origin.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from dcp.server.catalog.facts import END_OF_TIME, CheckpointFacts, FoundState
from dcp.server.catalog.inputs import format_in_catalog
from dcp.server.catalog.structures import StructureFacts, Tensor
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.digests import digest_of_all
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.opening import Source
from dcp.storage.formats.registry import DCP, by_precedence, file_names, formats, is_of_files
from dcp.storage.formats.views import dropped_from
from dcp.storage.stores.base import FileInfo

_LARGEST_STEP: Final = (1 << 63) - 1
_STEP: Final = re.compile(
    r"(?:^|step|iter|iteration|update|batch|epoch|checkpoint|ckpt|snapshot|save|state|model|weight)s?"
    r"[^A-Za-z0-9]*([0-9]+)(?:\.[A-Za-z]+)?$",
    re.IGNORECASE,
)
"""A number alone or after a word that trainers use for steps; not the number of a seed or version."""
_REVISION: Final = re.compile(r"[0-9a-f]{40}")
_METRIC: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@+=-]{0,127}")
_MAX_METRICS: Final = 1000
_KEPT_PROVENANCE: Final = (
    "save_id",
    "torch_version",
    "dcphub_version",
    "world_size",
    "sharded",
    "checkpoint_id",
    "resumed_from",
)
_MAX_PHASES: Final = 64
_MAX_MAP: Final = 256


def structure_of(index: CheckpointIndex) -> StructureFacts:
    """Return names, kinds, shapes and dtypes of all entries, in microseconds per entry."""
    objects = (Tensor(fqn, "object", None, None, 0) for fqn in index.objects.fqns)
    return StructureFacts.of([*_tensors(index), *objects])


def content_digest_of(index: CheckpointIndex) -> str | None:
    """Return one digest of all tensors by name; None if the manifest lacks a digest."""
    if not len(index.digests) or not all(index.digests):
        return None
    return digest_of_all((fqn, index.digest(row) or "") for row, fqn in enumerate(index.fqns))


def _tensors(index: CheckpointIndex) -> Iterator[Tensor]:
    bounds, sizes = index.shape_start.tolist(), index.shape_values.tolist()
    codes, itemsizes = index.dtype_codes.tolist(), index.itemsizes.tolist()
    names = {code: index.dtype(codes.index(code)).name for code in set(codes)}
    for fqn, code, itemsize, (begin, end) in zip(index.fqns, codes, itemsizes, pairwise(bounds), strict=True):
        shape = tuple(sizes[begin:end])
        yield Tensor(fqn, "tensor", names[code], shape, math.prod(shape) * itemsize)


def facts_of_source(
    root: str,
    key: str,
    source: Source,
    listing: Sequence[FileInfo] | None = None,
    *,
    observed_seconds: float,
    marks: Sequence[FileInfo] | None = None,
    fingerprint: str | None = None,
) -> CheckpointFacts:
    """Return the facts of an opened checkpoint. ``listing`` is the listing of the folder, read if None.

    ``marks`` and their ``fingerprint`` must precede the opening to expose concurrent changes; without
    ``marks`` they are taken from ``listing``.
    """
    index = source.index
    files = list(source.store.list() if listing is None else listing)
    if marks is None:
        marks = marks_of(files, source.file)
        fingerprint = fingerprint_of(marks)
    present = {info.name: info for info in files}
    sizes = [
        size if size != UNKNOWN else present[name].size_bytes if name in present else 0
        for name, size in zip(index.files, index.file_sizes.tolist(), strict=True)
    ]
    return facts_of_parts(
        root,
        key,
        format=index.format,
        provenance=index.provenance,
        user=index.user,
        structure=structure_of(index),
        content_digest=content_digest_of(index),
        fingerprint=fingerprint,
        bytes=sum(sizes),
        file_count=len(index.files),
        modified_seconds=max((info.modified_seconds for info in marks), default=0.0),
        observed_seconds=observed_seconds,
    )


def facts_of_parts(
    root: str,
    key: str,
    *,
    format: str,
    provenance: Mapping[str, Any],
    user: Mapping[str, Any],
    structure: StructureFacts,
    content_digest: str | None = None,
    fingerprint: str | None,
    bytes: int,
    file_count: int,
    modified_seconds: float,
    observed_seconds: float,
) -> CheckpointFacts:
    """Return the facts of the contents of an index."""
    own = {} if is_of_files(format) else user  # names in files are arbitrary text
    step = own.get("step")
    world_size = provenance.get("world_size")
    resumed_from = provenance.get("resumed_from")
    noted = own.get("metrics")
    metrics = _metrics(noted)
    complete = isinstance(noted, dict) and len(metrics) == len(noted)
    return CheckpointFacts(
        root=root,
        key=key,
        format=format_in_catalog(format),
        observed_seconds=observed_seconds,
        committed_seconds=_time(provenance.get("time"), modified_seconds),
        step=step if type(step) is int and 0 <= step <= _LARGEST_STEP else step_of_name(key),
        save_id=_save_id(provenance),
        resumed_from=_save_id(resumed_from) if isinstance(resumed_from, dict) else None,
        fingerprint=fingerprint,
        content_digest=content_digest,
        bytes=bytes,
        file_count=file_count,
        world_size=world_size if type(world_size) is int and world_size > 0 else None,
        structure=structure,
        metrics=metrics,
        user_metadata={name: value for name, value in user.items() if name != "metrics" or not complete},
        provenance=_provenance(provenance),
    )


def facts_without_index(
    root: str,
    key: str,
    state: FoundState,
    files: Sequence[FileInfo],
    *,
    observed_seconds: float,
    fingerprint: str | None = None,
    problem: str | None = None,
) -> CheckpointFacts:
    """Return the facts of a checkpoint without a readable index, from its ``files``.

    The state is "unreadable" with a ``problem``, or "incomplete" for a running or killed save.
    """
    return CheckpointFacts(
        root=root,
        key=key,
        format=_guessed_format(files),
        observed_seconds=observed_seconds,
        state=state,
        committed_seconds=_time(None, max((info.modified_seconds for info in files), default=0.0)),
        step=step_of_name(key),
        fingerprint=fingerprint,
        bytes=sum(info.size_bytes for info in files),
        file_count=len(files),
        problem=problem,
    )


def step_of_name(key: str) -> int | None:
    """Return the step number at the end of ``key`` before a suffix, alone or after a word for steps.

    Returns None without a number, and for revisions of a model hub.
    """
    name = key.rpartition("/")[2]
    match = None if _REVISION.fullmatch(name) else _STEP.search(name)
    return None if match is None or len(match[1]) > 18 else int(match[1])


def marks_of(listing: Iterable[FileInfo], file: str | None = None) -> list[FileInfo]:
    """Return the files that change with every change of the checkpoint.

    These are the commit objects, all files of weights without one, or the single ``file``.
    """
    if file is not None:
        return [info for info in listing if info.name == file]
    files = list(listing)
    for is_mark in (_is_whole_commit, is_commit_object, _is_weight):
        marks = [info for info in files if is_mark(info.name)]
        if marks:
            return marks
    return []


def _is_whole_commit(name: str) -> bool:
    return name in (MANIFEST_NAME, METADATA_NAME)


def _is_weight(name: str) -> bool:
    return file_names().in_folders.fullmatch(name) is not None


def fingerprint_of(marks: Iterable[FileInfo]) -> str:
    """Return a digest of names, sizes and times."""
    lines = sorted(f"{info.name}\0{info.size_bytes}\0{info.modified_seconds!r}\n" for info in marks)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _save_id(provenance: Mapping[str, Any]) -> str | None:
    save_id = provenance.get("save_id")
    return save_id if type(save_id) is str and 0 < len(save_id) <= 64 else None


def _provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return small facts unchanged, and of rank timings the slowest of each phase."""
    kept = {name: provenance[name] for name in _KEPT_PROVENANCE if provenance.get(name) is not None}
    if isinstance(weights := provenance.get("map"), str):
        kept["map"] = weights[:_MAX_MAP]
    slowest: dict[str, float] = {}
    ranks = provenance.get("rank_seconds")
    for figures in ranks if isinstance(ranks, list) else ():
        for name, value in figures.items() if isinstance(figures, dict) else ():
            if type(name) is str and type(value) is float and value > slowest.get(name, -1.0):
                slowest[name] = value
    dropped = dropped_from(provenance)
    if dropped:
        kept["dropped"] = [
            {
                "name": part.name,
                "patterns": list(part.patterns),
                "at": _moment(part.seconds),
                "tensors": part.tensors,
                "objects": part.objects,
                "bytes": part.bytes,
            }
            for part in dropped[:_MAX_PHASES]
        ]
    if slowest:
        kept["slowest_rank_seconds"] = dict(list(slowest.items())[:_MAX_PHASES])
    return kept


def _moment(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat() if 0 < seconds < END_OF_TIME else None


def _metrics(noted: Any) -> dict[str, float]:
    """Return the metrics with valid names and finite values."""
    found: dict[str, float] = {}
    for name, value in noted.items() if isinstance(noted, dict) else ():
        if type(name) is not str or not _METRIC.fullmatch(name) or len(found) >= _MAX_METRICS:
            continue
        if type(value) is float and math.isfinite(value):
            found[name] = value
        elif type(value) is int and abs(value) < 1 << 1023:
            found[name] = float(value)
    return found


def _time(value: Any, otherwise: float) -> float | None:
    """Return ``value`` if it is a valid time, else ``otherwise``; None if both are invalid.

    Storage without times must not make a new checkpoint appear fifty years old.
    """
    if type(value) is float and 0 < value < END_OF_TIME:
        return value
    return min(otherwise, END_OF_TIME) if otherwise > 0 else None


def _guessed_format(files: Sequence[FileInfo]) -> str:
    names = [info.name for info in files]
    for one in by_precedence(formats()):
        if any(one.is_in_folder(name) or one.has_suffix(name) for name in names):
            return one.name
    return DCP.name
