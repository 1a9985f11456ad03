"""The allow-list of classes in stock's `.metadata`, kept as inert values; torch-free.

Layouts of torch 2.0 to 2.15 differ in where a class lives (`TensorProperties` moved, `pathlib` was split) and
in which fields an object has; an absent field is its default. Seen in files of torch 2.13; for others
taken from torch's sources and pull requests: `storage_meta` came with 2.4, its `modules` with 2.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.pickle.decoder import Constructor, allow_list, instances
from dcp.storage.formats.torch.tensor_pickle import MAX_DIMENSIONS

__all__ = ["BYTES", "CHUNK", "FIELDS", "HF_INFO", "INDEX", "INFO", "META", "METADATA", "PROPERTIES", "TENSOR"]
__all__ += ["Layout", "UnknownDtype", "find_metadata_class"]

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
"""What the classes have up to torch 2.15; those of `StorageMeta` say nothing of what is stored.

``all_local_plans`` is Megatron-Core's: how the ranks planned, for its next save."""

_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


@dataclass(frozen=True, slots=True)
class UnknownDtype:
    """A dtype of torch that no checkpoint can hold: quantised, or narrower than a byte."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A torch.layout, e.g. ``torch.strided``."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """A torch.memory_format. Tensors are stored with their strides, so nothing depends on it."""

    number: int


def _size(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return torch.Size, as a tuple; its values are checked where they are used."""
    if len(args) != 1 or type(args[0]) not in (tuple, list) or len(args[0]) > MAX_DIMENSIONS:
        raise CheckpointFormatError("a pickled torch.Size is not made of a short tuple")
    return tuple(args[0])


def _layout(args: tuple[Any, ...]) -> Layout:
    if len(args) != 1 or type(args[0]) is not str or len(args[0]) > 64:
        raise CheckpointFormatError("a pickled layout has no name")
    return Layout(args[0])


def _memory_format(args: tuple[Any, ...]) -> MemoryFormat:
    if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] < len(_MEMORY_FORMATS):
        raise CheckpointFormatError("a pickled memory format has no known number")
    return MemoryFormat(args[0])


def _member(args: tuple[Any, ...]) -> MemoryFormat:
    """Return ``getattr(MemoryFormat, name)``, as Python 3.11.2 pickles enums; nothing else of getattr."""
    if len(args) == 2 and args[0] in _MEMORY_FORMAT_CLASSES and args[1] in _MEMORY_FORMATS:
        return MemoryFormat(_MEMORY_FORMATS.index(args[1]))
    raise CheckpointFormatError("a pickle asks for an attribute that is not a memory format")


def _path(args: tuple[Any, ...]) -> str:
    """Return a path of `pathlib`, as text."""
    if not all(type(part) is str for part in args):
        raise CheckpointFormatError("a pickled path has a part that is not text")
    if args and args[0].endswith(("/", "\\")):
        return str(args[0]) + "/".join(args[1:])
    return "/".join(args) or "."


def _item_type(args: tuple[Any, ...]) -> int:
    """Return a `WriteItemType`, in plans."""
    if len(args) != 1 or type(args[0]) is not int:
        raise CheckpointFormatError("a pickled WriteItemType has no number")
    return args[0]


_MEMORY_FORMAT_CLASSES = (
    Constructor("_MEM_FORMAT_ENCODING", reduce=_memory_format),
    Constructor("MEM_FORMAT_ENCODING", reduce=_memory_format),
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
    (f"{_CHECKPOINT}.planner", "WriteItemType"): Constructor("WriteItemType", reduce=_item_type),
    (f"{_CHECKPOINT}._hf_utils", "_HFStorageInfo"): instances(HF_INFO),
    (f"{_CHECKPOINT}._hf_storage", "_HFStorageInfo"): instances(HF_INFO),
    ("torch", "Size"): Constructor("torch.Size", reduce=_size),
    ("torch.serialization", "_get_layout"): Constructor("torch.serialization._get_layout", reduce=_layout),
    ("builtins", "getattr"): Constructor("builtins.getattr", reduce=_member),
    # Python 3.11.2 and older name the builtin so in protocol 2
    ("__builtin__", "getattr"): Constructor("builtins.getattr", reduce=_member),
    **{("torch", name): dtype for name, dtype in dtypes.BY_NAME.items()},
    **{("torch", name): UnknownDtype(name) for name in _UNKNOWN_DTYPES},
    **{
        (module, name): Constructor(f"{module}.{name}", reduce=_path)
        for module in ("pathlib", "pathlib._local")
        for name in _PATH_CLASSES
    },
}
find_metadata_class = allow_list(_ALLOWED, what=".metadata")
