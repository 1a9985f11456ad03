"""Structure of torch.save files: flatten the nested value into entries, and restore it.

Names are those of a flattened state dict (`dcp.planners.flatten`): dicts are flattened at every level, lists
if they contain a tensor, a dict or such a list. Tuples are flattened like lists if they contain a tensor or
an OrderedDict; `dcp.save` would store such a tuple as one pickled object. A file with a single tensor has
one entry ``tensor``, a file with another single value (also a plain list) one entry ``value``.

Facts beyond names and paths are in ``provenance["structure"]``, plain data::

    {"version": 1,
     "containers": [{"path": [...], "kind": "OrderedDict", "keys": [...], "metadata": {...}}, ...],
     "values": {fqn: "torch.Size"}}

``path`` has str for keys and int for positions, as in ``planner_data``. ``kind`` is "dict", "OrderedDict",
"Counter", "defaultdict" (with "factory", the name of a builtin type), "list", "tuple", "deque" (with
"maxlen"), or at the root "tensor" or "value" (no container). ``keys`` are all keys in order, noted if a key
is not a str or has no entry (an empty container); notes of a save may have "int_keys" instead, see
`dcp.storage.formats.container_notes`. ``metadata`` is the attribute ``_metadata`` of a module's state dict,
with plain dicts. Noted are only containers whose type does not follow from the path (a dict for a str, a
list for an int). ``values`` has the types of values stored as another type: a torch.Size as a tuple.
Torch-free.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from dcp.storage.errors import CheckpointFormatError, UnsafeObjectError, UnsupportedFormatError
from dcp.storage.formats import dtypes
from dcp.storage.formats.container_notes import (
    STRUCTURE_VERSION,
    empty_dicts,
    notes_by_path,
    original_keys,
)
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, Path, WholeTensor
from dcp.storage.formats.pickle.classes import DEFAULT_DICT, FACTORIES, DefaultDictPickle, DequePickle
from dcp.storage.formats.pickle.decoder import BuiltDict
from dcp.storage.formats.plain import MAX_FOREIGN_PLAIN_BYTES, encode_plain
from dcp.storage.formats.registry import TORCH_SAVE
from dcp.storage.formats.torch.archive import TorchArchive
from dcp.storage.formats.torch.pickle_reader import (
    COUNTER,
    MAX_FILE_PICKLE_BYTES,
    ORDERED_DICT,
    SIZE,
    SizePickle,
    TensorPickle,
    decode_torch_pickle,
)
from dcp.storage.formats.torch.python_values import encode_value, kind_of, leaf_bytes, python_value
from dcp.storage.geometry.strides import dense_order, extent, is_c_ordered

MAX_NESTING: Final = 64
"""Maximum nesting; deeper containers are hostile or contain themselves."""

MAX_ENTRIES: Final = 400_000

_KINDS: Final = {ORDERED_DICT: "OrderedDict", COUNTER: "Counter", DEFAULT_DICT: "defaultdict"}
_ENTRIES_PER_BYTE: Final = 2
_FREE_ENTRIES: Final = 4096
_FREE_BYTES: Final = 1 << 20
_PLAIN_ATOMS: Final = frozenset((type(None), bool, int, float, complex, str, bytes))
_OPENED: Final = (list, tuple, DequePickle)

_NAMED_KEYS: Final = frozenset((type(None), bool, int, float, str, bytes))


class _Facts(NamedTuple):
    """Container facts: it ``opens`` in a list, ``must_open`` even in a tuple; minimum size in bytes."""

    opens: bool
    must_open: bool
    size_bytes: int


class _FileFlattener:
    """Entries of a file in order: ``tensors`` and ``paths`` by name, ``values`` by `encode_value`.

    ``refused`` maps the names of unreadable entries to the class they need. Work is linear in
    ``pickle_bytes``.

    `run` raises CheckpointFormatError for a pickle that contains itself or exceeds MAX_NESTING, and
    UnsupportedFormatError for duplicate names.
    """

    def __init__(self, pickle_bytes: int) -> None:
        self.tensors: dict[str, TensorPickle] = {}
        self.values: dict[str, bytes] = {}
        self.paths: dict[str, Path] = {}
        self.refused: dict[str, str] = {}
        self.structure: dict[str, Any] = {"version": STRUCTURE_VERSION, "containers": [], "values": {}}
        self._facts: dict[int, _Facts | None] = {}
        self._needs: dict[int, str] = {}
        """Class of the first value in a container that is not harmless."""
        self._empty: dict[int, bool] = {}
        self._entries_left = min(_ENTRIES_PER_BYTE * pickle_bytes + _FREE_ENTRIES, MAX_ENTRIES)
        self._bytes_left = 2 * pickle_bytes + _FREE_BYTES

    def run(self, root: Any) -> None:
        """Flatten the decoded pickle ``root``."""
        if isinstance(root, dict) or (type(root) in _OPENED and self._facts_of(root, 0).opens):
            self._open("", (), root, 0)
        else:
            name = "tensor" if isinstance(root, TensorPickle) else "value"
            self.structure["containers"].append({"path": [], "kind": name})
            self._visit(name, (name,), root, 0)

    def _facts_of(self, value: Any, depth: int) -> _Facts:
        """Return the facts of a container, computed once."""
        if id(value) not in self._facts:
            self._facts[id(value)] = None
            self._facts[id(value)] = self._find_facts(value, depth)
        known = self._facts[id(value)]
        if known is None:
            raise CheckpointFormatError(
                "the pickle has a container that contains itself, which is not supported"
            )
        return known

    def _find_facts(self, value: Any, depth: int) -> _Facts:
        if depth > MAX_NESTING:
            raise CheckpointFormatError(f"the pickle is nested deeper than {MAX_NESTING} levels, the limit")
        opens, must_open, size_bytes = False, isinstance(value, BuiltDict), 1
        needs = SIZE if isinstance(value, SizePickle) else None
        for item in value.values() if isinstance(value, dict) else value:
            kind = type(item)
            if kind in _PLAIN_ATOMS:
                size_bytes += len(item) + 1 if kind is str or kind is bytes else 1
            elif isinstance(item, (dict, list, tuple)):
                facts = self._facts_of(item, depth + 1)
                opens |= facts.opens or isinstance(item, dict)
                must_open |= facts.must_open
                size_bytes += facts.size_bytes
                needs = needs or self._needs.get(id(item))
            elif isinstance(item, TensorPickle) or getattr(item, "is_tensor", False):
                opens = must_open = True
            else:
                item_bytes = leaf_bytes(item)
                size_bytes += item_bytes or 0
                needs = needs or (kind_of(item) if item_bytes is None else None)
        if isinstance(value, dict):
            size_bytes += sum(len(key) + 1 if type(key) is str else 1 for key in value)
            nameless = next((key for key in value if _key_name(key) is None), None)
            needs = needs or (None if nameless is None else f"{kind_of(nameless)} as a key")
        if needs is not None:
            self._needs[id(value)] = needs
        return _Facts(must_open if isinstance(value, tuple) else opens, must_open, size_bytes)

    # -- entries ---------------------------------------------------------------------------------------------

    def _visit(self, fqn: str, path: Path, value: Any, depth: int) -> None:
        self._entries_left -= 1
        if self._entries_left < 0:
            raise CheckpointFormatError(
                f"the pickle has more than {MAX_ENTRIES} entries, or repeats shared parts many times"
            )
        if isinstance(value, TensorPickle):
            self._name(fqn, path)
            self.tensors[fqn] = value
        elif isinstance(value, dict) or (
            isinstance(value, (list, tuple)) and self._facts_of(value, depth).opens
        ):
            self._open(fqn, path, value, depth)
        else:
            self._leaf(fqn, path, value)

    def _open(self, fqn: str, path: Path, value: Any, depth: int) -> None:
        if depth > MAX_NESTING:
            raise CheckpointFormatError(
                f"the pickle is nested deeper than {MAX_NESTING} levels, or contains itself"
            )
        self._note_container(path, value)
        prefix = f"{fqn}." if path else ""
        if isinstance(value, dict):
            found = [(_key_name(key), key, item) for key, item in value.items()]
            names = [name for name, _, _ in found if name is not None]
            if len(set(names)) < len(names):
                raise _collision(f"{prefix}{Counter(names).most_common(1)[0][0]}")
            for position, (name, key, item) in enumerate(found):
                if name is None:
                    self.refused[f"{prefix}<key {position}>"] = f"{kind_of(key)} as a key"
                else:
                    self._visit(f"{prefix}{name}", (*path, name), item, depth + 1)
        else:
            for position, item in enumerate(value):
                self._visit(f"{prefix}{position}", (*path, position), item, depth + 1)

    def _leaf(self, fqn: str, path: Path, value: Any) -> None:
        self._name(fqn, path)
        size_bytes: int | None = 1
        needs = None
        if isinstance(value, SizePickle):
            self.structure["values"][fqn] = SIZE
            value = tuple(value)
        elif isinstance(value, (list, tuple)):
            size_bytes, needs = self._facts_of(value, 0).size_bytes, self._needs.get(id(value))
        elif type(value) not in _PLAIN_ATOMS:
            size_bytes = leaf_bytes(value)
            needs = kind_of(value) if size_bytes is None else None
        encoded = None
        if needs is None and size_bytes is not None and size_bytes <= MAX_FOREIGN_PLAIN_BYTES:
            try:
                encoded = self._encoded(value, size_bytes)
            except UnsafeObjectError as error:
                needs = str(error).removeprefix("needs ")
        if encoded is None:
            del self.paths[fqn]
            self.refused[fqn] = needs or f"a value of more than {MAX_FOREIGN_PLAIN_BYTES >> 20} MiB"
        else:
            self._bytes_left -= len(encoded)
            self.values[fqn] = encoded

    def _encoded(self, value: Any, size_bytes: int) -> bytes | None:
        """Return the encoding of a leaf; None if too large."""
        if size_bytes > self._bytes_left:
            raise CheckpointFormatError("the pickle repeats shared values to many times its length")
        encoded = encode_plain(value, limit_bytes=MAX_FOREIGN_PLAIN_BYTES)
        return encode_value(python_value(value, size_bytes)) if encoded is None else encoded

    def _name(self, fqn: str, path: Path) -> None:
        if fqn in self.paths or fqn in self.refused:
            raise _collision(fqn)
        self.paths[fqn] = path

    def _note_container(self, path: Path, value: Any) -> None:
        note: dict[str, Any] = {}
        if isinstance(value, BuiltDict):
            note["kind"] = _KINDS[value.kind]
            if isinstance(value, DefaultDictPickle) and value.factory is not None:
                note["factory"] = f"builtins.{value.factory.__name__}"
            note |= self._metadata(value.state)
        elif isinstance(value, tuple):
            note["kind"] = "tuple"
        elif isinstance(value, DequePickle):
            note |= {"kind": "deque", "maxlen": value.max_length}
        elif isinstance(value, list) and not (path and value):
            note["kind"] = "list"
        if isinstance(value, dict) and (
            any(type(key) is not str for key in value) or any(map(self._is_empty, value.values()))
        ):
            note["keys"] = [key for key in value if _key_name(key) is not None]
        if note or self._is_empty(value):
            self.structure["containers"].append({"path": list(path), "kind": "dict", **note})

    def _is_empty(self, value: Any, depth: int = 0) -> bool:
        """Return True if a container leaves no entry; an empty list is a value."""
        if not isinstance(value, dict) or depth > MAX_NESTING:
            return False
        known = self._empty.get(id(value))
        if known is None:
            self._empty[id(value)] = False
            known = all(self._is_empty(item, depth + 1) for item in value.values())
            self._empty[id(value)] = known
        return known

    def _metadata(self, state: Any) -> dict[str, Any]:
        """Return the note of a module's ``_metadata`` on an OrderedDict; empty without metadata."""
        metadata = state.get("_metadata") if isinstance(state, dict) else None
        if not isinstance(metadata, dict):
            return {}
        size_bytes = self._facts_of(metadata, 0).size_bytes
        if size_bytes > self._bytes_left:
            raise CheckpointFormatError("the pickle repeats shared values to many times its length")
        self._bytes_left -= size_bytes
        plain = {key: dict(item) if isinstance(item, dict) else item for key, item in metadata.items()}
        is_plain = encode_plain(plain, limit_bytes=MAX_FOREIGN_PLAIN_BYTES) is not None
        return {"metadata": plain} if is_plain else {}


def _collision(fqn: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"two entries of the file flatten to the same name {fqn[:200]!r}; load the file with "
        f"torch.load(weights_only=True), rename one and save it again",
        fqn=fqn[:200],
    )


def _key_name(key: Any) -> str | None:
    """Return the name part of a dict key; None for keys that no entry can have."""
    if type(key) is str:
        return key
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _NAMED_KEYS for part in parts):
        return None
    try:
        return str(key)
    except ValueError as error:  # an integer of more digits than Python prints
        raise CheckpointFormatError("the pickle has a dict key with thousands of digits") from error


# -- restoring -----------------------------------------------------------------------------------------------


def restore_structure(structure: Any, paths: Mapping[str, Path], value_of: Callable[[str], Any]) -> Any:
    """Return the nested value of entries: ``paths`` by name in order, ``value_of(fqn)`` is called once per
    entry.

    ``structure`` is the note of flattening, or None for plain dicts and lists. The caller restores value
    types.

    Raises:
        CheckpointFormatError: For malformed notes, and for paths that do not fit.
    """
    notes = notes_by_path(structure)
    if notes.get((), {}).get("kind") in ("tensor", "value"):
        return next((value_of(fqn) for fqn in paths), None)
    tree = _Node()
    above, node = None, tree
    for fqn, path in paths.items():
        if path[:-1] != above or not path:  # most entries are neighbors
            above, node = path[:-1], _node_at(tree, path)
        if path[-1] in node:
            raise CheckpointFormatError(f"two entries of the checkpoint have the path {path!r:.200}")
        node[path[-1]] = value_of(fqn)
    for path in empty_dicts(notes, ()) if notes else ():
        node = _node_at(tree, path)
        if type(node.setdefault(path[-1], _Node())) is not _Node:
            raise CheckpointFormatError(f"two entries of the checkpoint have the path {path!r:.200}")
    return _build(tree, (), notes)


class _Node(dict[Any, Any]):
    """Container under construction."""


def _node_at(tree: _Node, path: Path) -> _Node:
    """Return the container at ``path``, created if missing."""
    node = tree
    if not 0 < len(path) <= MAX_NESTING + 1:
        raise CheckpointFormatError(
            f"the checkpoint has a path of {len(path)} parts; paths must have 1 to {MAX_NESTING + 1}"
        )
    for part in path[:-1]:
        node = node.setdefault(part, _Node())
        if type(node) is not _Node:
            raise CheckpointFormatError(f"the path {path!r:.200} of the checkpoint goes through a value")
    return node


def _build(tree: _Node, path: Path, notes: Mapping[Path, Mapping[str, Any]]) -> Any:
    note = notes.get(path, {})
    is_list = bool(tree) and {int}.issuperset(map(type, tree))
    kind, most = note.get("kind", "list" if is_list else "dict"), note.get("maxlen")
    children = {
        part: _build(child, (*path, part), notes) if type(child) is _Node else child
        for part, child in tree.items()
    }
    if kind in ("list", "tuple", "deque") and (is_list or not tree):
        items = [children[part] for part in sorted(children)]
        if kind == "deque":
            return deque(items, most if type(most) is int and 0 <= most <= sys.maxsize else None)
        return tuple(items) if kind == "tuple" else items
    if kind == "dict" and "keys" not in note and "int_keys" not in note:
        return children
    pairs = [(key, children[name]) for name, key in original_keys(note, children).items()]
    if kind == "Counter":
        return Counter(dict(pairs))
    if kind == "defaultdict":
        return defaultdict(FACTORIES.get(note.get("factory", "")), pairs)
    if kind != "OrderedDict":
        return dict(pairs)
    result = OrderedDict(pairs)
    if "metadata" in note:
        result._metadata = OrderedDict(note["metadata"])  # type: ignore[attr-defined]  # as torch.nn.Module does
    return result


_EXPANDED_BYTES: Final = 16 << 30
_EXPANSION: Final = 1024
"""Maximum ratio of tensor bytes to file size; expanded masks and views exceed 1."""


def index_of_torch_file(read: Callable[[int, int], bytes], size_bytes: int, name: str) -> CheckpointIndex:
    """Return the index of the file ``name``, read by ``read(offset, length)``.

    A chunk is a whole tensor: the record is the storage, the payload spans the first to the last element.
    Tied tensors and views share records; ``record_crcs`` has the checksums.

    Raises:
        UnsupportedFormatError: For older formats of torch, TorchScript, big-endian files and files of a
            single foreign object.
        CheckpointFormatError: For damaged and hostile files.
        CorruptCheckpointError: If the pickle's checksum differs.
    """
    archive = TorchArchive(read, size_bytes)
    archive.check_byte_order()
    pickled = archive.content(b"data.pkl", MAX_FILE_PICKLE_BYTES)
    flat = _FileFlattener(len(pickled))
    flat.run(decode_torch_pickle(pickled))
    if not flat.paths and flat.refused.keys() == {"value"}:
        raise UnsafeObjectError(
            f"the file is a single pickled object that needs {flat.refused['value']}, which is not on the "
            "allow-list; no code was run. Save a state dict instead: torch.save(model.state_dict(), ...)",
            global_name=flat.refused["value"],
        )
    _check_expansion(flat, size_bytes)
    return _index(flat, archive, size_bytes, name)


def _check_expansion(flat: _FileFlattener, size_bytes: int) -> None:
    """Refuse tensors much larger than the file: overlapping views and expanded tensors cost their full size
    on read.
    """
    views = {
        (one.storage_key, one.storage_offset, one.sizes, one.dtype_code): one for one in flat.tensors.values()
    }
    described = sum(math.prod(one.sizes) * dtypes.BY_CODE[one.dtype_code].itemsize for one in views.values())
    limit = _EXPANDED_BYTES + _EXPANSION * size_bytes
    if described > limit:
        raise CheckpointFormatError(
            f"the file has {size_bytes} bytes, but its tensors would take {described}, more than the limit "
            f"of {limit}: save clones of expanded tensors instead of views"
        )


def _storages(flat: _FileFlattener, archive: TorchArchive) -> dict[str, bytes]:
    """Return the zip entries of tensors by storage key."""
    found: dict[str, bytes] = {}
    for fqn, tensor in flat.tensors.items():
        key = tensor.storage_key
        name = found.get(key) or b"data/" + key.encode("utf-8", "surrogatepass")
        entry = archive.entries.get(name)
        if entry is None or entry.size != tensor.storage_bytes:
            size = "no" if entry is None else entry.size
            raise CheckpointFormatError(
                f"the zip has {size} bytes for the storage {key!r}, but {fqn[:200]!r} needs "
                f"{tensor.storage_bytes}: the file is damaged",
                fqn=fqn,
            )
        found[key] = name
    return found


def _index(flat: _FileFlattener, archive: TorchArchive, size_bytes: int, name: str) -> CheckpointIndex:
    storages = _storages(flat, archive)
    places = archive.places(storages.values())
    tensors: list[WholeTensor] = []
    records, record_lengths, lengths, strides, orders, crcs = [], [], [], {}, {}, {}
    for row, (fqn, tensor) in enumerate(flat.tensors.items()):
        place, itemsize = storages[tensor.storage_key], dtypes.BY_CODE[tensor.dtype_code].itemsize
        entry, record = archive.entries[place], places[place]
        begin = record + (tensor.storage_offset * itemsize if 0 not in tensor.sizes else 0)
        tensors.append(WholeTensor(fqn, tensor.dtype_code, tensor.sizes, name, begin))
        records.append(record)
        record_lengths.append(entry.size)
        lengths.append(extent(tensor.sizes, tensor.strides) * itemsize)
        if not is_c_ordered(tensor.sizes, tensor.strides):
            strides[row] = tensor.strides
            order = dense_order(tensor.sizes, tensor.strides)
            if order is not None:  # channels_last, a transpose
                orders[row] = order
        if entry.crc32 and entry.size:
            crcs[row] = entry.crc32
    refused = {"refused_objects": flat.refused} if flat.refused else {}
    return CheckpointIndex.of_whole_tensors(
        TORCH_SAVE.name,
        tensors,
        {name: size_bytes},
        requires_grad=np.array([tensor.requires_grad for tensor in flat.tensors.values()], dtype=np.uint8),
        record_offsets=np.array(records, dtype=np.int64),
        record_lengths=np.array(record_lengths, dtype=np.int64),
        payload_lengths=np.array(lengths, dtype=np.int64),
        objects=ObjectColumns.of_plain(flat.values),
        stride_orders=orders,
        payload_strides=strides,
        record_crcs=crcs,
        planner_data=flat.paths,
        provenance={"structure": flat.structure} | refused,
    )
