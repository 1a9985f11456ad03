"""Reader of stock's `.metadata` with an allow-list of classes, kept as inert values. Torch-free.

Layouts of torch 2.0 to 2.15 differ in the modules of classes (`TensorProperties`, `pathlib`) and in fields;
absent fields have defaults. Torch 2.13 was checked with files, other versions with torch's sources:
`storage_meta` came with 2.4, its `modules` with 2.7.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import MAX_DIMENSIONS, UNKNOWN, CheckpointIndex, ObjectColumns
from dcp.storage.formats.pickle.decoder import Constructor, Instance, allow_list, decode_pickle, instances
from dcp.storage.formats.registry import TORCH_DCP
from dcp.storage.geometry.strides import Int64, starts

METADATA = "Metadata"
TENSOR = "TensorStorageMetadata"
BYTES = "BytesStorageMetadata"
CHUNK = "ChunkStorageMetadata"
PROPERTIES = "TensorProperties"
INDEX = "MetadataIndex"
INFO = "_StorageInfo"
HF_INFO = "_HFStorageInfo"
META = "StorageMeta"

FIELDS = {
    METADATA: frozenset(
        ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "all_local_plans")
    ),
    TENSOR: frozenset(("properties", "size", "chunks")),
    BYTES: frozenset[str](),
    CHUNK: frozenset(("offsets", "sizes")),
    INDEX: frozenset(("fqn", "offset", "index")),
    INFO: frozenset(("relative_path", "offset", "length", "transform_descriptors")),
    HF_INFO: frozenset(("relative_path", "shape", "dtype", "offset", "length")),
}
"""Fields of the classes up to torch 2.15. ``all_local_plans`` is Megatron-Core's, for its next save."""

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


class _TorchName(str):
    """torch.layout, ``torch.strided``, or a dtype that no checkpoint can hold: quantized or narrower than a
    byte.
    """


def _is_short(value: Any) -> bool:
    """Return True if ``value`` may be a torch.Size; values are checked on use."""
    return type(value) in (tuple, list) and len(value) <= MAX_DIMENSIONS


def _checked(what: str, is_right: Callable[[Any], bool], make: Callable[[Any], Any]) -> Constructor:
    """Return a constructor with an argument checked by ``is_right`` and converted by ``make``."""

    def reduce(args: tuple[Any, ...]) -> Any:
        if len(args) != 1 or not is_right(args[0]):
            raise CheckpointFormatError(f"the pickle has invalid arguments for {what}")
        return make(args[0])

    return Constructor(what, reduce=reduce)


def _member(args: tuple[Any, ...]) -> int:
    """Return ``getattr(MemoryFormat, name)``, as Python 3.11.2 pickles enums; other uses are refused."""
    if len(args) == 2 and args[0] in _MEMORY_FORMAT_CLASSES and args[1] in _MEMORY_FORMATS:
        return _MEMORY_FORMATS.index(args[1])
    raise CheckpointFormatError("the pickle calls getattr for something other than a torch memory format")


def _path(args: tuple[Any, ...]) -> str:
    """Return a path of `pathlib` as text."""
    if not all(type(part) is str for part in args):
        raise CheckpointFormatError("the pickle has invalid arguments for pathlib.Path: not all are strings")
    if args and args[0].endswith(("/", "\\")):
        return str(args[0]) + "/".join(args[1:])
    return "/".join(args) or "."


# Values are inert: nothing depends on a memory format, since tensors are stored with their strides.
_MEMORY_FORMAT_CLASSES = tuple(
    _checked(name, lambda number: type(number) is int and 0 <= number < len(_MEMORY_FORMATS), int)
    for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
)
_NARROW = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
_UNKNOWN_DTYPES = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4", *_NARROW)
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (f"{_CHECKPOINT}.metadata", name): instances(name)
        for name in (METADATA, TENSOR, BYTES, CHUNK, PROPERTIES, INDEX, META)
    },
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT_CLASSES[0],
    (_SHARDED, "MEM_FORMAT_ENCODING"): _MEMORY_FORMAT_CLASSES[1],
    (_SHARDED, "TensorProperties"): instances(PROPERTIES),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): instances(INFO),
    (f"{_CHECKPOINT}.filesystem", "_StoragePrefix"): instances("_StoragePrefix"),
    **{
        (f"{_CHECKPOINT}.planner", name): instances(name)
        for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
    },
    (f"{_CHECKPOINT}.planner", "WriteItemType"): _checked(
        "WriteItemType", lambda number: type(number) is int, int
    ),
    (f"{_CHECKPOINT}._hf_utils", "_HFStorageInfo"): instances(HF_INFO),
    (f"{_CHECKPOINT}._hf_storage", "_HFStorageInfo"): instances(HF_INFO),
    ("torch", "Size"): _checked("torch.Size", _is_short, tuple),
    ("torch.serialization", "_get_layout"): _checked(
        "layout", lambda name: type(name) is str and len(name) <= 64, _TorchName
    ),
    ("builtins", "getattr"): Constructor("builtins.getattr", reduce=_member),
    # Python 3.11.2 and older name the builtin so in protocol 2
    ("__builtin__", "getattr"): Constructor("builtins.getattr", reduce=_member),
    **{("torch", name): dtype for name, dtype in dtypes.BY_NAME.items()},
    **{("torch", name): _TorchName(name) for name in _UNKNOWN_DTYPES},
    **{
        (module, name): Constructor(f"{module}.{name}", reduce=_path)
        for module in ("pathlib", "pathlib._local")
        for name in _PATH_CLASSES
    },
}
find_metadata_class = allow_list(_ALLOWED, what=".metadata")


MAX_METADATA_BYTES = 1 << 34
"""Maximum size, about 60 million chunks; callers set lower limits."""

MAX_PLAIN_DEPTH = 64
MAX_TEXT_CHARACTERS = 1 << 14
"""Maximum length of a name, and of ids in ``provenance``."""

_Box = tuple[int, ...]


def decode_torch_metadata(data: bytes | memoryview) -> CheckpointIndex:
    """Return the checked index of a checkpoint of stock torch, format ``torch_dcp``.

    Payload offsets, file sizes and checksums are UNKNOWN or absent. Tensors and objects keep the file's
    order. ``provenance`` may have ``save_id``, ``checkpoint_id`` and ``torch_metadata_version``. If a
    custom planner left data other than plain data, ``planner_data`` is None and ``planner_data_dropped``
    gives the reason.

    Raises:
        UnsafeObjectError: For a class that does not belong into the file.
        UnsupportedFormatError: For unreadable known contents: stream transforms, sparse or quantized
            tensors, additions of newer torch.
        CorruptCheckpointError: For an entry without stored bytes, as after a failed writer thread of stock.
        CheckpointFormatError: For other invalid data.
    """
    metadata = decode_pickle(data, find=find_metadata_class, limit_bytes=MAX_METADATA_BYTES)
    state = _fields(metadata, METADATA, "the pickled value")
    _check_version(state.get("version"))
    entries = state.get("state_dict_metadata")
    if type(entries) is not dict:
        raise CheckpointFormatError("the file has no state_dict_metadata, which torch's Metadata always has")
    columns = _Columns(_locate(state.get("storage_data")), most_chunks=len(data) // 4)
    for fqn, entry in entries.items():
        columns.add(fqn, entry)
    provenance = _provenance(state)
    planner_data = state.get("planner_data")
    problem = plain_problem(planner_data, [4 * len(data) + 4096])
    if problem:
        planner_data = None
        provenance["planner_data_dropped"] = f"it {problem[0]}"
    return columns.index(planner_data, provenance)


def _fields(value: Any, kind: str, where: str) -> dict[str, Any]:
    """Return the attributes of an instance."""
    if not isinstance(value, Instance) or value.kind != kind:
        found = value.kind if isinstance(value, Instance) else type(value).__name__
        raise CheckpointFormatError(f"{where} must be a {kind}, not a {found}")
    state = value.state
    if state is None:
        return {}
    if type(state) is not dict:
        raise CheckpointFormatError(f"{where}: the state of a {kind} must be a dict of its fields")
    known = FIELDS.get(kind)
    if known is not None and not state.keys() <= known:
        new = [name for name in state.keys() - known if state[name]]
        if new:  # an unknown field may change the meaning of known ones
            raise UnsupportedFormatError(
                f"{where}: the field {str(new[0])[:80]!a} of a {kind} is unknown here; it was written by a "
                f"newer torch or an extension of torch: load the checkpoint with that version"
            )
    return state


def _check_version(version: Any) -> None:
    major = version.partition(".")[0] if type(version) is str else ""
    if major.isdecimal() and len(major) < 10 and int(major) > 1:
        raise UnsupportedFormatError(
            f"the metadata has version {version[:40]}, but the newest supported version is 1: it was written "
            "by a newer torch; load the checkpoint with that torch",
            version=version[:40],
        )


def _integers(value: Any, what: str, fqn: str) -> tuple[int, ...]:
    """Return a shape or position of exact ints, because hashing other tuples may be expensive."""
    if not _is_short(value) or not _INT_ONLY.issuperset(map(type, value)):
        raise CheckpointFormatError(f"{what} of {fqn!a} must be a tuple of integers", fqn=fqn)
    return tuple(value)


_INT_ONLY = frozenset((int,))
_Ranges = tuple["array[int]", "array[int]", "array[int]"]
_Places = dict[str, dict[_Box | None, dict[str, Any]]]


def _locate(storage_data: Any) -> _Places:
    """Return the storage info's fields by name and offset in the tensor."""
    if type(storage_data) is not dict:
        raise UnsupportedFormatError(
            f"storage_data is a {type(storage_data).__name__}, not a dict: the checkpoint was written by a "
            "custom storage writer; load it with the matching storage reader"
        )
    places: _Places = {}
    for key, info in storage_data.items():
        fields = _fields(key, INDEX, "a key of storage_data")
        fqn, offset = fields.get("fqn"), fields.get("offset")
        if type(fqn) is not str or len(fqn) > MAX_TEXT_CHARACTERS:
            raise CheckpointFormatError(
                f"a key of storage_data has no fqn, or one longer than {MAX_TEXT_CHARACTERS} characters"
            )
        if offset is not None:
            offset = _integers(offset, "an offset", fqn)
        named = places.setdefault(fqn, {})
        if offset in named:
            raise CheckpointFormatError(
                f"storage_data has two entries for {fqn!a} at offset {offset}", fqn=fqn
            )
        named[offset] = _info(info, fqn)
    return places


def _info(info: Any, fqn: str) -> dict[str, Any]:
    kind = info.kind if isinstance(info, Instance) else ""
    if kind not in (INFO, HF_INFO):
        raise UnsupportedFormatError(
            f"storage_data of {fqn!a} is not a _StorageInfo of torch's FileSystemWriter: the checkpoint was "
            "written by a custom storage writer; load it with the matching storage reader",
            fqn=fqn,
        )
    fields = _fields(info, kind, f"storage_data of {fqn!a}")
    if fields.get("transform_descriptors"):
        raise UnsupportedFormatError(
            f"{fqn!a} was stored with a stream transform (an extension that compresses or encrypts), which "
            "dcp does not support; load it with stock torch and that extension, and save it without one",
            fqn=fqn,
        )
    return fields


class _Columns:
    """Columns of an index under construction. ``array`` refuses values outside of int64."""

    def __init__(self, places: _Places, *, most_chunks: int) -> None:
        self._places = places
        self._chunks_left = most_chunks
        self._files: dict[str, int] = {}
        self._fqns: list[str] = []
        self._objects: list[str] = []
        self._dtypes, self._grads = bytearray(), bytearray()
        self._ndims, self._shapes, self._counts = (array("q") for _ in range(3))
        self._offsets, self._sizes, self._payloads = (array("q") for _ in range(3))
        self._ranges, self._object_ranges = ((array("q"), array("q"), array("q")) for _ in range(2))

    def add(self, fqn: Any, entry: Any) -> None:
        """Add one entry of state_dict_metadata."""
        if type(fqn) is not str or len(fqn) > MAX_TEXT_CHARACTERS:
            raise CheckpointFormatError(
                f"a key of state_dict_metadata is not a string of at most {MAX_TEXT_CHARACTERS} characters"
            )
        kind = entry.kind if isinstance(entry, Instance) else type(entry).__name__
        try:
            if kind == TENSOR:
                self._add_tensor(fqn, _fields(entry, kind, "an entry"))
            elif kind == BYTES:
                info = self._places.get(fqn, {}).get(None)
                if info is None:
                    _missing(fqn, None)
                self._objects.append(fqn)
                self._add_range(self._object_ranges, info, fqn)
            else:
                raise CheckpointFormatError(
                    f"state_dict_metadata of {fqn!a} is a {kind}, neither a tensor nor an object", fqn=fqn
                )
        except (OverflowError, TypeError) as error:
            raise CheckpointFormatError(
                f"state_dict_metadata or storage_data of {fqn!a} has a number that is not an int64", fqn=fqn
            ) from error

    def _add_tensor(self, fqn: str, fields: Mapping[str, Any]) -> None:
        dtype, requires_grad = _properties(fields.get("properties"), fqn)
        shape = _integers(fields.get("size"), "the size", fqn)
        chunks = fields.get("chunks")
        self._chunks_left -= len(chunks) if type(chunks) is list else 0
        if type(chunks) is not list or self._chunks_left < 0:
            # more chunks than fit in the file: one list shared by many tensors
            raise CheckpointFormatError(
                f"the chunks of {fqn!a} are not a list, or the file repeats one list for many tensors",
                fqn=fqn,
            )
        boxes = _boxes(chunks, len(shape), fqn)
        named = self._places.get(fqn, {})
        for offsets, sizes in boxes:
            info = named.get(offsets)
            if info is None and len(boxes) == 1:
                info = named.get(None)  # old torch stored no offset for whole tensors
            if info is None:
                _missing(fqn, offsets)
            self._offsets.extend(offsets)
            self._sizes.extend(sizes)
            self._payloads.append(math.prod(sizes) * dtype.itemsize)
            self._add_range(self._ranges, info, fqn)
        self._fqns.append(fqn)
        self._dtypes.append(dtype.code)
        self._grads.append(requires_grad)
        self._ndims.append(len(shape))
        self._shapes.extend(shape)
        self._counts.append(len(boxes))

    def _add_range(self, ranges: _Ranges, info: Mapping[str, Any], fqn: str) -> None:
        name = info.get("relative_path")
        if type(name) is not str or "offset" not in info or "length" not in info:
            raise UnsupportedFormatError(
                f"storage_data of {fqn!a} lacks a file, offset or length, as in the .metadata of a folder of "
                "safetensors files; move .metadata away to open the folder as safetensors",
                fqn=fqn,
            )
        ranges[0].append(self._files.setdefault(name, len(self._files)))
        ranges[1].append(info["offset"])
        ranges[2].append(info["length"])

    def index(self, planner_data: Any, provenance: dict[str, Any]) -> CheckpointIndex:
        """Return the finished index, checked."""
        chunks, objects = len(self._payloads), len(self._objects)
        files, offsets, lengths = map(_column, self._object_ranges)
        result = CheckpointIndex(
            format=TORCH_DCP.name,
            fqns=self._fqns,
            dtype_codes=np.frombuffer(self._dtypes, dtype=np.uint8),
            shape_start=starts(_column(self._ndims)),
            shape_values=_column(self._shapes),
            requires_grad=np.frombuffer(self._grads, dtype=np.uint8),
            chunk_start=starts(_column(self._counts)),
            chunk_offsets=_column(self._offsets),
            chunk_sizes=_column(self._sizes),
            chunk_files=_column(self._ranges[0]),
            record_offsets=_column(self._ranges[1]),
            record_lengths=_column(self._ranges[2]),
            payload_offsets=np.full(chunks, UNKNOWN, dtype=np.int64),
            payload_lengths=_column(self._payloads),
            crc_start=np.zeros(chunks + 1, dtype=np.int64),
            files=list(self._files),
            file_sizes=np.full(len(self._files), UNKNOWN, dtype=np.int64),
            objects=ObjectColumns(
                fqns=self._objects,
                files=files,
                offsets=offsets,
                lengths=lengths,
                crcs=np.full(objects, UNKNOWN, dtype=np.int64),
                plain=np.full(objects, -1, dtype=np.int64),
            ),
            planner_data=planner_data,
            provenance=provenance,
        )
        result.check()
        return result


def _column(values: array[int]) -> Int64:
    return np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, dtype=np.int64)


def _missing(fqn: str, offsets: _Box | None) -> NoReturn:
    where = "" if offsets is None else f" at {offsets}"
    raise CorruptCheckpointError(
        f"the metadata lists {fqn!a}{where} without a file that stores it: the save did not complete. "
        "Load an earlier checkpoint",
        fqn=fqn,
    )


def _properties(value: Any, fqn: str) -> tuple[dtypes.Dtype, bool]:
    """Return (dtype, requires_grad) from the pickled state of TensorProperties with five fields.

    torch 2.15 added a sixth field, the strides of the saved tensor; strides of stored bytes are in the
    record.
    """
    where = f"the properties of {fqn!a}"
    state = value.state if isinstance(value, Instance) and value.kind == PROPERTIES else None
    if type(state) is not tuple or len(state) < 5:
        raise CheckpointFormatError(f"{where} are not a TensorProperties of torch", fqn=fqn)
    if len(state) > 6:
        raise UnsupportedFormatError(
            f"{where} have {len(state)} fields, but this dcphub knows 6: they were written by a newer torch; "
            "load the checkpoint with that torch",
            fqn=fqn,
        )
    dtype, layout, requires_grad = state[:3]
    if isinstance(dtype, _TorchName) and dtype.startswith("q"):
        raise UnsupportedFormatError(
            f"{fqn!a} is quantized (torch.{dtype}), and .metadata does not store its scale and zero point. "
            "Load the checkpoint with stock torch into tensors with the same scales, and save it without "
            "this tensor, or dequantized",
            fqn=fqn,
        )
    if isinstance(dtype, _TorchName):
        raise UnsupportedFormatError(
            f"{fqn!a} has the dtype torch.{dtype}, which this version of dcp cannot hold", fqn=fqn
        )
    if not isinstance(dtype, dtypes.Dtype) or not isinstance(layout, _TorchName):
        raise CheckpointFormatError(f"{where} lack a dtype or a layout", fqn=fqn)
    if layout != "torch.strided":
        raise UnsupportedFormatError(
            f"{fqn!a} has the layout {layout!a}, but only dense tensors are supported: load the checkpoint "
            "with stock torch, and save it with to_dense()",
            fqn=fqn,
        )
    if type(requires_grad) is not bool:
        raise CheckpointFormatError(f"{where}: requires_grad must be a bool", fqn=fqn)
    return dtype, requires_grad


def _boxes(chunks: list[Any], ndim: int, fqn: str) -> list[tuple[_Box, _Box]]:
    """Return (offsets, sizes) of the chunks, each offset once.

    A record is found by offset alone; a second chunk at the same offset is a replica, or the empty shard of
    a rank beyond the end.
    """
    boxes: dict[_Box, _Box] = {}
    for chunk in chunks:
        fields = _fields(chunk, CHUNK, f"the list of chunks of {fqn!a}")
        offsets = _integers(fields.get("offsets"), "a chunk's offsets", fqn)
        sizes = _integers(fields.get("sizes"), "a chunk's sizes", fqn)
        if len(offsets) != ndim or len(sizes) != ndim:
            raise CheckpointFormatError(
                f"a chunk of {fqn!a} at {offsets} with sizes {sizes} does not have {ndim} dimensions, as the "
                "tensor has",
                fqn=fqn,
            )
        known = boxes.setdefault(offsets, sizes)
        if known is not sizes and known != sizes:
            if 0 not in known and 0 not in sizes:
                raise CheckpointFormatError(
                    f"two chunks of {fqn!a} with different sizes begin at {offsets}", fqn=fqn
                )
            boxes[offsets] = known if 0 in sizes else sizes
    return list(boxes.items())


def _provenance(state: Mapping[str, Any]) -> dict[str, Any]:
    meta = state.get("storage_meta")
    fields = {} if meta is None else _fields(meta, META, "storage_meta")
    found = {name: fields.get(name) for name in ("save_id", "checkpoint_id")}
    found["torch_metadata_version"] = state.get("version")
    return {
        name: value
        for name, value in found.items()
        if type(value) is str and len(value) <= MAX_TEXT_CHARACTERS
    }


def plain_problem(
    value: Any, parts_left: list[int] | None = None, depth: int = 0
) -> tuple[str, dict[str, Any]] | None:
    """Return the reason why planner data is not plain, such as "holds a set", with facts; None if plain.

    ``parts_left`` limits the number of visited parts, because shared parts make traversal long.
    """
    kind = type(value)
    if kind in _SCALARS:
        return None
    if depth >= MAX_PLAIN_DEPTH:
        return f"is nested deeper than {MAX_PLAIN_DEPTH} levels", {"depth": depth}
    if kind not in (dict, list, tuple):
        place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        name = value.kind if isinstance(value, Instance) else f"{place}{kind.__qualname__}"
        return f"holds a {name}", {"type_name": name}
    for values in (value, value.values()) if kind is dict else (value,):
        if parts_left is not None:
            parts_left[0] -= len(values)
            if parts_left[0] < 0:
                raise CheckpointFormatError(
                    "planner_data repeats shared parts many times: the file is damaged or hostile"
                )
        if not _SCALARS.issuperset(map(type, values)):
            problems = (plain_problem(item, parts_left, depth + 1) for item in values)
            problem = next(filter(None, problems), None)
            if problem:
                return problem
    return None


_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))
