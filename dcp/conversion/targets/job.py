"""Layout jobs: input and result of a format's layout function.

A writable format is a function from a `LayoutJob` to a `Planned` target, named by its
`dcp.storage.formats.format.Target`. The function describes files and positions of tensor bytes; the bytes are
copied later.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from dcp.conversion.arithmetic import Arithmetic
from dcp.conversion.hf_folder import HfFolder, read_hf_folder
from dcp.conversion.layout import TargetLayout
from dcp.inspection.entries import Entries, TargetDtype, Value
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.weight_maps.axes import CONFIG, config_of
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CorruptCheckpointError,
    OptionError,
    PlanError,
    UnsafeObjectError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.dtypes import Dtype
from dcp.storage.formats.format import Format, found
from dcp.storage.formats.index import UNKNOWN
from dcp.storage.formats.native.record import object_record
from dcp.storage.formats.plain import encode_plain
from dcp.storage.formats.registry import file_names, formats, target_named
from dcp.storage.formats.torch.archive import ObjectBlob
from dcp.storage.formats.torch.pickle_reader import DevicePickle, SizePickle, TensorPickle
from dcp.storage.formats.torch.python_values import HARMLESS_MARK, decode_value
from dcp.storage.formats.torch.writer import PickledTensor
from dcp.storage.near_names import listed
from dcp.storage.stores import OpenStore
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store, check_name, place_text
from dcp.storage.stores.opening import OpenWith
from dcp.storage.stores.posix.files import step, storage_error
from dcp.storage.stores.posix.store import PosixStore

_MAX_LISTED: Final = 10
_MAX_VALUE_BYTES: Final = 64 << 20


Chunks = Literal["keep", "split"]
"""``keep``: the source's chunks. ``split``: divide each tensor along dimension 0 into as many chunks as
files."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of `dcp.convert` that define the target's contents.

    ``to`` is the `Target.name`. ``files`` to ``drop_objects``, and ``hf`` (copied files), apply to some
    formats only. With ``arithmetic`` the conversion is a `dcp.merge` of joined sources
    (`dcp.conversion.merging`). ``weight_maps`` is one for all sources, or one for each; empty without maps.
    """

    to: str
    only: Patterns | None = None
    exclude: Patterns | None = None
    rename: Rename | None = None
    dtype: TargetDtype = None
    weight_maps: tuple[WeightMap | None, ...] = ()
    files: int = 1
    chunks: Chunks = "keep"
    shard_bytes: int | None = None
    drop_objects: bool = False
    arithmetic: Arithmetic | None = None
    hf: HfFolder | None = None

    def with_hf(
        self, hf: HfFolder | str | os.PathLike[str] | None, also: Sequence[str] = ()
    ) -> ConversionOptions:
        """Return the options with the files of a template, or of the arguments ``hf`` and ``hf_also``; its
        configuration serves the map too."""
        if hf is None:
            if also:
                raise OptionError("hf_also= requires hf=")
            return self
        template = hf if isinstance(hf, HfFolder) else read_hf_folder(hf, also)
        known: Mapping[str, Any] = {}
        if CONFIG in template.files:
            known = config_of(template.files[CONFIG], f"{CONFIG} of {template.url}")
        maps = tuple(one and replace(one, config={**known, **one.config}) for one in self.weight_maps)
        return replace(self, hf=template, weight_maps=maps)


@dataclass(frozen=True)
class Planned:
    """The result of a format: a layout, and the names of left out values.

    The other fields complete the plan for publication; `dcp.conversion.driver.encode` makes text of the plan.
    ``unmerged`` are tensors copied from a merge's first source. ``chunks`` are the source chunks to read.
    ``inode`` identifies the local folder to rename.
    """

    layout: TargetLayout
    dropped: tuple[str, ...]
    unmerged: tuple[str, ...] = ()
    source_mark: str = ""
    chunks: tuple[int, ...] = ()
    batch_count: int = 0
    inode: int | None = None


@dataclass(frozen=True)
class LayoutJob:
    """Input of a format: ``entries`` to write, and ``engine`` to read the source.

    ``file_name`` is the name of a single-file target. ``is_compared``: the copy verifies the source's
    checksums, and the target needs none for these bytes. ``origin`` goes to the provenance.
    """

    entries: Entries
    engine: ReadEngine
    options: ConversionOptions
    file_name: str | None
    save_id: str
    is_compared: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    _blobs: dict[tuple[int, int, int], bytes] = field(default_factory=dict)

    @garbage_collection_paused()
    def plan(self) -> Planned:
        """Lay out the target. PlanError names values that the format cannot hold and must not drop."""
        planned: Planned = found(target_named(self.options.to)[1].layout)(self)
        planned.layout.check()
        return planned

    def contents(self, *, is_plain_only: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return (values by name, dropped names) as `kept`. ``is_plain_only``: accept plain data only."""
        contents: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for value in self.entries.values:
            try:
                content = self.value(value.row)
                if is_plain_only and encode_plain(content, limit_bytes=_MAX_VALUE_BYTES) is None:
                    raise CheckpointFormatError("is not plain data, or too large")
                contents[value.fqn] = content
            except CheckpointFormatError as error:
                refused[value.fqn] = str(error)
        return contents, self.kept(refused)[1]

    def kept(self, refused: Mapping[str, str]) -> tuple[list[Value], tuple[str, ...]]:
        """Return (kept values, dropped names) after removing ``refused`` and untrusted values. PlanError
        unless they may be dropped."""
        refused = {**self.entries.refused, **refused}
        if not refused:
            return [*self.entries.values], ()
        if not self.options.drop_objects:
            shown = listed([f"{fqn!r} ({why})" for fqn, why in refused.items()], most=_MAX_LISTED, show=str)
            raise PlanError(
                f"{len(refused)} of the values cannot be converted to {self.options.to}: {shown}. Exclude "
                "these values",
                alternative="drop all unsupported values",
                argument="drop_objects=True",
                fqns=list(refused)[:_MAX_LISTED],
            )
        return [value for value in self.entries.values if value.fqn not in refused], tuple(refused)

    def value(self, row: int) -> Any:
        """Return the harmless value of a row, with `PickledTensor` for inner tensors.

        UnsafeObjectError (a CheckpointFormatError) for other values; pickles are never executed.
        """
        number = int(self.engine.index.objects.plain[row])
        if number >= 0:
            return decode_value(self.engine.index.objects.values[number])
        blob, fqn = self.blob(row), self.engine.index.objects.fqns[row]
        if blob[:1] == b"\x80":  # torch's format of before 1.6: magic number, protocol, facts, then the value
            raise UnsafeObjectError(f"object {fqn!r} is in a format that only torch can read", fqn=fqn)
        try:
            opened = ObjectBlob(blob)
            special: dict[type, Callable[[Any], Any]] = dict.fromkeys(
                (SizePickle, Dtype, DevicePickle), lambda value: value
            )
            special[TensorPickle] = lambda one: PickledTensor(
                one.dtype_code, one.sizes, opened.elements(one).tobytes(), requires_grad=one.requires_grad
            )
            return opened.value(special)
        except CheckpointFormatError as error:
            raise type(error)(f"object {fqn!r}: {error}", **{**error.facts, "fqn": fqn}) from error

    def encoded(self, row: int) -> bytes | None:
        """Return the msgpack encoding of a plain value; None for any other."""
        number = int(self.engine.index.objects.plain[row])
        if number >= 0:
            encoded = self.engine.index.objects.values[number]
            return None if encoded[:1] == HARMLESS_MARK else encoded
        try:
            return encode_plain(self.value(row))
        except CheckpointFormatError:
            return None

    def blob(self, row: int) -> bytes:
        """Return the torch.save bytes of a row, as stored or made from plain data."""
        objects, fqn = self.engine.index.objects, self.engine.index.objects.fqns[row]
        place = int(objects.files[row]), int(objects.offsets[row]), int(objects.lengths[row])
        if place[0] < 0:
            return object_record(pickle.dumps(self.value(row), protocol=2))
        if place[2] > _MAX_BLOB_BYTES:
            raise CheckpointFormatError(
                f"the object {fqn!r} has {place[2]} bytes, more than the limit of {_MAX_BLOB_BYTES}; exclude "
                "the object",
                fqn=fqn,
            )
        if place not in self._blobs:
            blob = self.engine.read_blob(*place)
            got, expected = crc32(blob), int(objects.crcs[row])
            if self.engine.verify != "none" and expected not in (UNKNOWN, got):
                raise CorruptCheckpointError(
                    f"{self.engine.store.url}: object {fqn!r} is damaged: CRC-32 is {got:08x}, expected "
                    f"{expected:08x}. Convert another checkpoint, or exclude the object",
                    fqn=fqn,
                )
            self._blobs[place] = blob
        return self._blobs[place]


_MAX_BLOB_BYTES = 256 << 20
_PLAIN: Final = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))
_TORCH_KNOWS: Final = _PLAIN | {SizePickle, Dtype, DevicePickle, PickledTensor}


def torch_allows(value: Any) -> bool:
    """Test whether `torch.load(weights_only=True)` accepts the value of `LayoutJob.value`."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        return all(torch_allows(part) for pair in value.items() for part in pair)
    if kind in (list, tuple, set):
        return all(map(torch_allows, value))
    return kind in _TORCH_KNOWS


# -- places --------------------------------------------------------------------------------------------------


_WORK_PREFIX: Final = f"{TEMPORARY_PREFIX}convert-"


@dataclass(frozen=True)
class TargetPlace:
    """A target. ``store`` holds its files; ``file_name`` is set for a single file; ``path`` for a local
    target.

    ``attempt`` distinguishes concurrent attempts, with a work folder for each.
    """

    url: str
    store: Store
    file_name: str | None
    path: Path | None
    attempt: str = ""
    open_store: OpenStore = PosixStore

    def holder(self, path: str) -> tuple[Store, str]:
        """Return the folder of a target file (the target or a direct subfolder) and the file's name."""
        folder, slash, name = path.partition("/")
        return (self.open_store(f"{self.store.url}/{folder}"), name) if slash else (self.store, path)

    @property
    def work_folder(self) -> Path:
        """Folder in which a local target is built, beside the target."""
        if self.path is None:
            raise PlanError(f"{self.url} is not a local path")
        return self.path.parent / _work_name(self.path.name + (f"/{self.attempt}" if self.attempt else ""))

    @property
    def ledger_name(self) -> str:
        """Name of the ledger object of a remote target."""
        return _work_name(self.file_name)

    @property
    def is_begun(self) -> bool:
        """Test for a conversion to resume."""
        if self.path is not None:
            return os.path.lexists(self.work_folder)
        return self.store.stat(self.ledger_name) is not None

    def ledger_of(self, batch: int) -> str:
        """Return the name of the ledger of an attempt's batch."""
        return _work_name(f"{self.attempt}/{batch}")

    def exists(self, is_leftover: Callable[[str], bool] | None = None) -> bool:
        """Test for a file or a folder with contents at the target. Ledgers and names accepted by
        ``is_leftover`` do not count."""
        if self.path is not None:
            with step(None, "stat", self.path):
                is_empty = self.path.is_dir() and not self.path.is_symlink() and not any(self.path.iterdir())
                return os.path.lexists(self.path) and (self.file_name is not None or not is_empty)
        if self.file_name is not None:
            return self.store.stat(self.file_name) is not None
        names = (info.name for info in self.store.list() if not info.name.startswith(_WORK_PREFIX))
        return any(is_leftover is None or not is_leftover(name) for name in names)

    def refuse_existing(self, is_leftover: Callable[[str], bool] | None = None) -> None:
        """Raise CheckpointConflictError if the target `exists`."""
        if self.exists(is_leftover):
            raise CheckpointConflictError(
                f"{self.url} already exists; choose another target",
                alternative="replace it",
                argument="overwrite=True",
                path=self.url,
            )


def is_written_under(ledgers: Collection[str], name: str) -> bool:
    """Test whether a conversion with one of these ledgers writes the file ``name`` to a store.

    Files of a ``dcp`` target belong to a save.
    """
    is_shard = file_names().mark_folders.fullmatch(name) is not None and _work_name(None) in ledgers
    return is_shard or _work_name(name) in ledgers


def _work_name(what: str | None) -> str:
    digest = hashlib.sha256((what or "").encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{_WORK_PREFIX}{digest}"


def place_of(target: str | os.PathLike[str], to: str, open_store: OpenWith) -> TargetPlace:
    """Return the place of a target in the format ``to``: a file or a folder."""
    text = place_text(target)
    one, written = target_named(to)
    is_named = one.has_suffix(text.rstrip("/"))
    is_file = written.as_file == "always" or (written.as_file == "by name" and is_named)
    if not is_named and written.as_file != "never":
        _check_suffix(text, to, one)
    store = open_store(text)
    if not store.capabilities.is_writable:
        raise OptionError(
            f"{store.url} is read-only ({type(store).__name__}): choose another target", path=store.url
        )
    if store.capabilities.is_local:
        try:
            return _local_place(text, Path(store.url), store, is_file=is_file)
        except OSError as error:  # the name is too long, or the folder is not accessible
            raise storage_error(error, "stat", store.url) from error
    if not is_file:
        return TargetPlace(store.url, store, None, None, open_store=open_store)
    parent, _, name = store.url.rpartition("/")
    if not name or parent.endswith("/") or "://" not in parent:
        raise OptionError(f"{text!r} has no file name below a bucket or folder")
    return TargetPlace(store.url, open_store(parent), check_name(name), None)


def _check_suffix(text: str, to: str, one: Format) -> None:
    """Raise OptionError for the suffix of another format, which would mislead readers."""
    for other in formats():
        if other.has_suffix(text.rstrip("/")) and other.target is not None:
            kind, ends = other.target.name, ", ".join(one.suffixes)
            raise OptionError(
                f"{text} has the suffix of the format {kind!r}, but to={to!r}: pass to={kind!r} "
                f"(--to {kind}), or a target that ends with {ends}"
            )


def _local_place(text: str, path: Path, store: Store, *, is_file: bool) -> TargetPlace:
    if not path.name:
        raise OptionError(f"the target {text!r} is not a valid file or folder name")
    if is_file:
        if path.is_dir():
            raise OptionError(f"the target {path} is a folder; pass the name of a file", path=str(path))
        if path.exists() and not path.is_file():
            raise OptionError(f"the target {path} is not a regular file; choose another", path=str(path))
        return TargetPlace(str(path), PosixStore(path.parent), check_name(path.name), path)
    if path.exists() and not path.is_dir():
        raise OptionError(f"the target {path} is a file; pass the name of a folder", path=str(path))
    return TargetPlace(str(path), store, None, path)
