"""What the catalog keeps of a checkpoint, taken from its index and the listing of its files alone.

Pure: nothing is opened here. Text, numbers and sizes are made such that both databases can hold them:
checkpoints come from anybody, and hold names with NUL, steps of a hundred digits and metrics that are NaN.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal, Self

from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.manifest import MANIFEST_NAME, METADATA_NAME
from dcp.storage.formats.open import is_commit_object
from dcp.storage.formats.sources import FILE_FORMATS, Source
from dcp.storage.stores.base import FileInfo

__all__ = [
    "CheckpointFacts",
    "FoundState",
    "StructureFacts",
    "StructureTensor",
    "fingerprint_of",
    "marks_of",
    "plain_json",
    "step_of_name",
]

FoundState = Literal["committed", "incomplete", "unreadable"]
"""What looking at storage can find; the catalog's other states are about what was done since."""

_LARGEST: Final = (1 << 63) - 1
_END_OF_TIME: Final = 253_402_300_799.0  # of the year 9999, the last that dates are written for
_NAME_LIMIT: Final = 128
_PROBLEM_LIMIT: Final = 2000
_JSON_LIMIT: Final = 65_536
_JSON_DEPTH: Final = 16
_STEP: Final = re.compile(r"([0-9]+)(?:\.[A-Za-z]+)?$")
_WEIGHT_MARKS: Final = (".safetensors", ".bin", ".index.json")
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
_KEPT_PROVENANCE: Final = (
    "save_id",
    "torch_version",
    "dcphub_version",
    "world_size",
    "sharded",
    "checkpoint_id",
)


@dataclass(frozen=True, slots=True)
class StructureTensor:
    """A tensor (``bytes`` of all its elements), or a value that is none, without ``dtype`` and ``shape``."""

    fqn: str
    kind: Literal["tensor", "object"]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class StructureFacts:
    """Names, kinds, shapes and dtypes. ``digest`` is the SHA-256 over them in the order of names: the format,
    the sharding and the values do not count. ``tensors`` are in that order, values that are none included."""

    digest: str
    tensor_count: int
    object_count: int
    element_count: int
    bytes: int
    dtypes: Mapping[str, int]
    tensors: Sequence[StructureTensor]

    @classmethod
    def of_index(cls, index: CheckpointIndex) -> Self:
        """Of all tensors and values of ``index``; some microseconds for each."""
        rows = [*_tensors(index), *((fqn, "object", None, None, 0, 0) for fqn in index.objects.fqns)]
        rows.sort(key=lambda row: row[0])
        digest = hashlib.sha256()
        dtypes: dict[str, int] = {}
        for fqn, kind, dtype, shape, _, size_bytes in rows:
            line = f"{len(fqn)}:{fqn}:{kind}:{dtype or ''}:{','.join(map(str, shape or ()))}\n"
            digest.update(line.encode("utf-8", "surrogatepass"))
            if dtype is not None:
                dtypes[dtype] = min(dtypes.get(dtype, 0) + size_bytes, _LARGEST)
        return cls(
            digest=digest.hexdigest(),
            tensor_count=index.tensor_count,
            object_count=len(index.objects),
            element_count=min(sum(row[4] for row in rows), _LARGEST),
            bytes=min(sum(row[5] for row in rows), _LARGEST),
            dtypes=dict(sorted(dtypes.items())),
            tensors=[
                StructureTensor(_storable(fqn), kind, dtype, shape, min(size_bytes, _LARGEST))
                for fqn, kind, dtype, shape, _, size_bytes in rows
            ],
        )


_Row = tuple[str, Literal["tensor", "object"], str | None, tuple[int, ...] | None, int, int]


def _tensors(index: CheckpointIndex) -> Iterable[_Row]:
    bounds, sizes = index.shape_start.tolist(), index.shape_values.tolist()
    names = {code: index_dtype.name for code, index_dtype in _dtypes(index).items()}
    itemsizes = index.itemsizes.tolist()
    columns = zip(index.fqns, index.dtype_codes.tolist(), pairwise(bounds), itemsizes, strict=True)
    for fqn, code, (begin, end), itemsize in columns:
        shape = tuple(sizes[begin:end])
        elements = math.prod(shape)
        yield fqn, "tensor", names[code], shape, elements, elements * itemsize


def _dtypes(index: CheckpointIndex) -> dict[int, Any]:
    first: dict[int, int] = {}
    for row, code in enumerate(index.dtype_codes.tolist()):
        first.setdefault(code, row)
    return {code: index.dtype(row) for code, row in first.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """One checkpoint as it is on storage now: ``key`` below the root named ``root``.

    ``fingerprint`` is that of the files that make it what it is (`fingerprint_of`), None while it may change
    without showing. ``problem`` says why an unreadable one is. ``committed_seconds`` of what is not
    committed is the time of its newest file. ``user_metadata`` and ``provenance`` are JSON.
    """

    root: str
    key: str
    format: str
    state: FoundState
    committed_seconds: float
    step: int | None = None
    save_id: str | None = None
    fingerprint: str | None = None
    bytes: int = 0
    file_count: int = 0
    world_size: int | None = None
    structure: StructureFacts | None = None
    problem: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_key(self) -> str:
        """The folder that holds it; "" is the root itself."""
        return self.key.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @classmethod
    def of_source(
        cls,
        root: str,
        key: str,
        source: Source,
        listing: Sequence[FileInfo] | None = None,
        *,
        marks: Sequence[FileInfo] | None = None,
        fingerprint: str | None = None,
    ) -> Self:
        """Of an opened checkpoint. ``listing`` is that of the folder, which is asked for if None.

        ``marks`` and their ``fingerprint`` must be from before it was opened, so that a change in between
        shows; without ``marks`` they are those of ``listing``.
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
        return cls.of_parts(
            root,
            key,
            format=index.format,
            provenance=index.provenance,
            user=index.user,
            structure=StructureFacts.of_index(index),
            fingerprint=fingerprint,
            bytes=sum(sizes),
            file_count=len(index.files),
            modified_seconds=max((info.modified_seconds for info in marks), default=0.0),
        )

    @classmethod
    def of_parts(
        cls,
        root: str,
        key: str,
        *,
        format: str,
        provenance: Mapping[str, Any],
        user: Mapping[str, Any],
        structure: StructureFacts,
        fingerprint: str | None,
        bytes: int,
        file_count: int,
        modified_seconds: float,
    ) -> Self:
        """Of what an index says, in whatever way that was read; foreign data is made storable."""
        own = {} if format in FILE_FORMATS else user  # text that others wrote, with names of their own
        step = own.get("step")
        time = provenance.get("time")
        world_size = provenance.get("world_size")
        save_id = provenance.get("save_id")
        return cls(
            root=root,
            key=key,
            format=format,
            state="committed",
            committed_seconds=_time(time, modified_seconds),
            step=step if type(step) is int and 0 <= step <= _LARGEST else step_of_name(key),
            save_id=_storable(save_id)[:64] if type(save_id) is str and save_id else None,
            fingerprint=fingerprint,
            bytes=min(bytes, _LARGEST),
            file_count=file_count,
            world_size=world_size if type(world_size) is int and 0 < world_size < 1 << 31 else None,
            structure=structure,
            metrics=_metrics(own.get("metrics")),
            user_metadata=_bounded({str(name): value for name, value in user.items() if name != "metrics"}),
            provenance=_provenance(provenance),
        )

    @classmethod
    def of_problem(
        cls, root: str, key: str, problem: str, files: Sequence[FileInfo], *, fingerprint: str | None = None
    ) -> Self:
        """Of one whose index cannot be read; ``files`` is what there is of it."""
        return cls._without_index(root, key, "unreadable", files, fingerprint, problem)

    @classmethod
    def of_incomplete(
        cls, root: str, key: str, files: Sequence[FileInfo], *, fingerprint: str | None = None
    ) -> Self:
        """Of data that nothing has committed: a save is under way, or was killed."""
        return cls._without_index(root, key, "incomplete", files, fingerprint, None)

    @classmethod
    def _without_index(
        cls,
        root: str,
        key: str,
        state: FoundState,
        files: Sequence[FileInfo],
        fingerprint: str | None,
        problem: str | None,
    ) -> Self:
        return cls(
            root=root,
            key=key,
            format=_guessed_format(files),
            state=state,
            committed_seconds=_time(None, max((info.modified_seconds for info in files), default=0.0)),
            step=step_of_name(key),
            fingerprint=fingerprint,
            bytes=min(sum(info.size_bytes for info in files), _LARGEST),
            file_count=len(files),
            problem=None if problem is None else _storable(problem)[:_PROBLEM_LIMIT],
        )


def step_of_name(key: str) -> int | None:
    """The number at the end of the last part of ``key``, before a suffix; None without one."""
    match = _STEP.search(key.rpartition("/")[2])
    if match is None or len(match[1]) > 18:
        return None
    return int(match[1])


def marks_of(listing: Iterable[FileInfo], file: str | None = None) -> list[FileInfo]:
    """The files of a folder that change whenever the checkpoint in it does: its commit objects, of weights
    without one all of them, or the one ``file``."""
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
    return name.endswith(_WEIGHT_MARKS)


def fingerprint_of(marks: Iterable[FileInfo]) -> str:
    """A digest of names, sizes and times."""
    lines = sorted(f"{info.name}\0{info.size_bytes}\0{info.modified_seconds!r}\n" for info in marks)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def plain_json(value: Any, *, depth: int = _JSON_DEPTH) -> Any:
    """``value`` as JSON that both databases store: what JSON has no form for becomes text, tuples lists, and
    what is nested deeper than ``depth`` is left out."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _storable(value)
    if isinstance(value, int):
        return value if abs(value) <= _LARGEST else str(value) if abs(value) < 1 << 4096 else "huge"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth <= 0:
        return None
    if isinstance(value, Mapping):
        return {_storable(str(name)): plain_json(item, depth=depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, depth=depth - 1) for item in value]
    return _storable(str(value))[:_PROBLEM_LIMIT]


def _bounded(value: Mapping[str, Any]) -> dict[str, Any]:
    """``value`` as JSON; entries that make it too large are named, and left out."""
    kept: dict[str, Any] = {}
    left_out, left = [], _JSON_LIMIT
    for name, item in value.items():
        plain = plain_json(item)
        size = len(name) + len(repr(plain))
        if size > left:
            left_out.append(_storable(name)[:_NAME_LIMIT])
            continue
        left -= size
        kept[_storable(name)] = plain
    return kept | ({"left_out": left_out[:100]} if left_out else {})


def _provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Small facts as they are; of the timings of thousands of ranks the slowest of each phase."""
    kept = {name: provenance[name] for name in _KEPT_PROVENANCE if provenance.get(name) is not None}
    slowest: dict[str, float] = {}
    ranks = provenance.get("rank_seconds")
    for figures in ranks if isinstance(ranks, list) else ():
        for name, value in figures.items() if isinstance(figures, dict) else ():
            if type(name) is str and type(value) is float and math.isfinite(value) and len(slowest) < 64:
                slowest[name] = max(slowest.get(name, 0.0), value)
    return _bounded(kept | ({"slowest_rank_seconds": slowest} if slowest else {}))


def _metrics(value: Any) -> dict[str, float]:
    """Those that a table, a cursor and JSON can hold: finite numbers, with names of a usual length."""
    found: dict[str, float] = {}
    for name, metric in value.items() if isinstance(value, dict) else ():
        if type(name) is not str or not 0 < len(name) <= _NAME_LIMIT or type(metric) not in (int, float):
            continue
        if type(metric) is int and abs(metric) >= 1 << 1023:
            continue
        if math.isfinite(metric):
            found[_storable(name)] = float(metric)
    return found


def _time(value: Any, otherwise: float) -> float:
    """``value`` if it is a time, else ``otherwise``: one that can be shown as a date in any case."""
    return (
        value
        if type(value) is float and 0 <= value < _END_OF_TIME
        else min(max(otherwise, 0.0), _END_OF_TIME)
    )


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", text) if not text.isascii() or "\0" in text else text


def _guessed_format(files: Sequence[FileInfo]) -> str:
    names = [info.name for info in files]
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    if any(name.endswith((".pt", ".pth", ".ckpt", ".bin", ".torch")) for name in names):
        return "torch_save"
    return "dcp"
