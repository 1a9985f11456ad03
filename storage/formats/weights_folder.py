"""Weight folders of model hubs as one `CheckpointIndex`. Only headers are read.

The first of these that exists gives the files (for the suffix ``.safetensors``; ``.bin`` is similar):

1. ``model.safetensors.index.json``, or the only ``*.safetensors.index.json``: every tensor must be in the
   file named by ``weight_map``; other tensors of these files are included
2. ``model.safetensors``
3. all ``*.safetensors`` files, if the format allows it; files numbered ``-00001-of-00003`` must be complete

A tensor name in two files is an error, except for shards of one tensor, noted in ``DCP_SHARDING_INFO`` by
`torch.distributed.checkpoint.HuggingFaceStorageWriter`. Other files of the folder are ignored. Entries of
``__metadata__`` that are equal in all files become ``user`` of the index, others
``provenance["file_metadata"]`` by file. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from dcp.storage.errors import CheckpointFormatError, CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import index_of_file
from dcp.storage.formats.safetensors import parse_json
from dcp.storage.formats.views import join_indexes
from dcp.storage.stores.base import Store, check_name
from dcp.storage.threads import WorkerThreads

MAX_WEIGHT_MAP_BYTES: Final = 32 << 20
"""Maximum size of an index file; 200,000 tensors take about 20 MB."""

_THREADS: Final = 8
_NUMBERED: Final = re.compile(r"(?P<stem>(?!shard-).*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\..*)")
_LISTED: Final = 5


_Weights = tuple[Sequence[str], Mapping[str, str] | None]
"""Weight files of a folder, and the expected file of each tensor if known."""


def index_of_safetensors_folder(store: Store) -> CheckpointIndex | None:
    """Return the index of all ``*.safetensors`` files; None without files. Raises as `_index_of`."""
    return _index_of(store, ".safetensors", "model.safetensors", takes_all=True)


def index_of_bin_folder(store: Store) -> CheckpointIndex | None:
    """Return the index of ``pytorch_model.bin`` or of ``*.bin`` files named by an index; see
    `index_of_safetensors_folder`.
    """
    return _index_of(store, ".bin", "pytorch_model.bin", takes_all=False)


def _index_of(store: Store, suffix: str, usual: str, *, takes_all: bool) -> CheckpointIndex | None:
    """Return the index of the weights in a folder, with files of ``suffix`` and ``usual`` as the name of a
    single file; None without weights. ``takes_all``: files of other names count too.

    Raises:
        CorruptCheckpointError: If files or tensors are missing.
        CheckpointFormatError: For names outside of the folder, duplicate names and invalid files.
        CheckpointNotFoundError: For duplicate names in files without an index.
    """
    names = [info.name for info in store.list() if not info.name.startswith(".")]
    weights = _choose(store, names, suffix, usual, takes_all=takes_all)
    if weights is None:
        return None
    files, mapped = weights
    missing = sorted(set(files) - set(names))
    if missing:
        raise CorruptCheckpointError(
            f"{store.url}: {len(missing)} of {len(files)} weight files are missing: "
            f"{', '.join(missing[:_LISTED])}; download or copy the folder again",
            path=store.path_of(missing[0]),
        )
    threads = min(len(files), store.read_profile.threads or _THREADS)
    with WorkerThreads(max(1, threads)) as pool:
        indexes = list(pool.map(partial(index_of_file, store), files))
    if mapped is not None:
        _check_map(store, mapped, dict(zip(files, indexes, strict=True)))
    are_parts = mapped is not None or any(map(_NUMBERED.fullmatch, files))
    return _joined(store, indexes, are_parts=are_parts)


# -- selection of files --------------------------------------------------------------------------------------


def _choose(
    store: Store, names: Sequence[str], suffix: str, usual: str, *, takes_all: bool
) -> _Weights | None:
    listing = _the_one(store, names, f"{suffix}.index.json", f"{usual}.index.json")
    if listing is not None:
        return _read_weight_map(store, listing, suffix)
    if usual in names:
        return (usual,), None
    files = [name for name in names if name.endswith(suffix)] if takes_all else []
    _check_numbers(store, files)
    return (files, None) if files else None


def _the_one(store: Store, names: Sequence[str], suffix: str, usual: str) -> str | None:
    found = [name for name in names if name.endswith(suffix)]
    if usual in found or not found:
        return usual if found else None
    if len(found) > 1:
        raise CheckpointFormatError(
            f"{store.url} has weights of several models ({', '.join(found[:_LISTED])}): move each model to "
            "its own folder",
            path=store.url,
        )
    return found[0]


def _read_weight_map(store: Store, name: str, suffix: str) -> _Weights:
    path = store.path_of(name)
    document = parse_json(store.read(name, limit_bytes=MAX_WEIGHT_MAP_BYTES), path)
    mapped = document.get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise CheckpointFormatError(f"{path} has no weight_map, or an empty one", path=path)
    for fqn, file in mapped.items():
        if not isinstance(file, str) or not file.endswith(suffix):
            raise CheckpointFormatError(
                f"{path}: weight_map must name a *{suffix} file for {fqn[:200]!r}", path=path, fqn=fqn
            )
    return sorted({check_name(file) for file in mapped.values()}), mapped


def _check_numbers(store: Store, files: Iterable[str]) -> None:
    """Require all files of ``model-00001-of-00003.safetensors`` without an index."""
    numbers: dict[tuple[str, int, str], set[int]] = {}
    for name in files:
        match = _NUMBERED.fullmatch(name)
        if match:
            of_all = match["stem"], int(match["count"]), match["suffix"]
            numbers.setdefault(of_all, set()).add(int(match["number"]))
    for (stem, count, suffix), found in numbers.items():
        missing = count - len(found & set(range(1, count + 1)))
        if missing:
            raise CorruptCheckpointError(
                f"{store.url}: {missing} of the {count} files {stem}-*-of-{count:05}{suffix} are "
                "missing; download or copy the folder again",
                path=store.url,
            )


# -- joining -------------------------------------------------------------------------------------------------


def _check_map(store: Store, mapped: Mapping[str, str], indexes: Mapping[str, CheckpointIndex]) -> None:
    for fqn, file in mapped.items():
        index = indexes[file]
        known = fqn in index.position or fqn in index.objects.position
        if not known and fqn not in index.provenance.get("refused_objects", {}):
            raise CorruptCheckpointError(
                f"{store.url}: weight_map places {fqn[:200]!r} in {file}, which does not contain it: the "
                "files have different versions; download the folder again",
                path=store.path_of(file),
                fqn=fqn,
            )


def _joined(store: Store, indexes: list[CheckpointIndex], *, are_parts: bool) -> CheckpointIndex:
    """Return one index of all files. ``are_parts``: the files are known to be parts of a checkpoint."""
    owners: dict[str, list[int]] = {}
    for number, index in enumerate(indexes):
        for fqn in [*index.fqns, *index.objects.fqns]:
            owners.setdefault(fqn, []).append(number)
    for fqn, numbers in owners.items():
        if len(numbers) > 1 and not all(indexes[number].provenance.get("sharded") for number in numbers):
            files = ", ".join(indexes[number].files[0] for number in numbers[:_LISTED])
            if not are_parts:
                raise CheckpointNotFoundError(
                    f"{store.url} is not a single checkpoint: {fqn[:200]!r} is in {len(numbers)} files "
                    f"({files}), each a separate checkpoint; pass the path of one of them",
                    path=store.url,
                    fqn=fqn,
                )
            raise CheckpointFormatError(
                f"{store.url}: {fqn[:200]!r} is in {len(numbers)} files ({files}), without an index that "
                "selects one; remove the duplicate, or download the folder again",
                path=store.url,
                fqn=fqn,
            )
    shared = {fqn: numbers for fqn, numbers in owners.items() if len(numbers) > 1}
    whole = _with_whole_shapes(indexes, shared) if shared else indexes
    joined = join_indexes(dict(enumerate(whole)))
    if any(index.provenance.get("sharded") for index in indexes):
        _check_covered(store, joined)
    user, by_file = _metadata(indexes)
    provenance: dict[str, Any] = {"file_metadata": by_file} if by_file else {}
    return replace(joined, provenance=provenance | _torch_notes(indexes), user=user)


def _with_whole_shapes(
    indexes: Sequence[CheckpointIndex], shared: Mapping[str, Sequence[int]]
) -> list[CheckpointIndex]:
    """Return the indexes with the whole shapes of shards, which only know their offsets."""
    shapes = [index.shape_values.copy() for index in indexes]
    for fqn, numbers in shared.items():
        rows = [(number, indexes[number].position[fqn]) for number in numbers]
        ends = [indexes[number].shape(row) for number, row in rows]
        if len({len(end) for end in ends}) > 1:
            raise CheckpointFormatError(
                f"the shards of {fqn[:200]!r} have different numbers of dimensions", fqn=fqn
            )
        whole = [max(sizes) for sizes in zip(*ends, strict=True)]
        for number, row in rows:
            begin = int(indexes[number].shape_start[row])
            shapes[number][begin : begin + len(whole)] = whole
    return [replace(index, shape_values=shape) for index, shape in zip(indexes, shapes, strict=True)]


def _check_covered(store: Store, joined: CheckpointIndex) -> None:
    for row, fqn in enumerate(joined.fqns):
        size_bytes = int(np.prod(joined.shape(row), dtype=np.float64)) * joined.dtype(row).itemsize
        found = sum(int(joined.payload_lengths[chunk]) for chunk in joined.chunks(row))
        if found != size_bytes:
            raise CorruptCheckpointError(
                f"{store.url}: the shards of {fqn[:200]!r} have {found} bytes in total, but the tensor has "
                f"{size_bytes}: files are missing, or from different saves",
                path=store.url,
                fqn=fqn,
            )


def _metadata(indexes: Sequence[CheckpointIndex]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return (metadata common to all files, the rest by file)."""
    common = {
        key: value
        for key, value in indexes[0].user.items()
        if all(index.user.get(key) == value for index in indexes)
    }
    rest = {
        index.files[0]: {key: value for key, value in index.user.items() if key not in common}
        for index in indexes
    }
    return common, {file: found for file, found in rest.items() if found}


def _torch_notes(indexes: Sequence[CheckpointIndex]) -> dict[str, Any]:
    """Return the notes of all torch.save files; the first file's notes on nested containers."""
    found: dict[str, Any] = {}
    refused = {
        fqn: kind for index in indexes for fqn, kind in index.provenance.get("refused_objects", {}).items()
    }
    structures = [index.provenance["structure"] for index in indexes if "structure" in index.provenance]
    if refused:
        found["refused_objects"] = refused
    if structures:
        containers = {tuple(note["path"]): note for one in reversed(structures) for note in one["containers"]}
        values = {fqn: kind for one in structures for fqn, kind in one["values"].items()}
        found["structure"] = {"version": 1, "containers": list(containers.values()), "values": values}
    return found
