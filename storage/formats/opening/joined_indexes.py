"""One index out of several that ranks saved on their own (``use_collectives=False``). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import CheckpointFormatError, ReplicaMismatchError
from dcp.storage.formats.container_notes import Noted, join_notes, notes_by_path, structure_of_notes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64, ObjectColumns, starts

__all__ = ["join_indexes"]

_Chunk = tuple[int, int]  # position of the index, row of the chunk in it


def join_indexes(indexes: Mapping[int, CheckpointIndex], *, own_rank: int | None = None) -> CheckpointIndex:
    """The union of the indexes of ranks: tensors of one name are one tensor, with the chunks of all ranks.

    A box that several ranks saved is kept once, of the lowest rank; so is an object. Planner data are joined;
    provenance and user metadata are those of the lowest rank. ``own_rank``, if it is among them, comes before
    all others, and its data may differ from theirs.

    Raises ReplicaMismatchError where checksums prove that the ranks' data differ, CheckpointFormatError where
    dtypes or shapes do, or the ranks' numbers of one save.
    """
    ranks = sorted(indexes, key=lambda rank: (rank != own_rank, rank))
    own = 0 if own_rank in indexes else None
    parts = [indexes[rank] for rank in ranks]
    if len(parts) == 1:
        return parts[0]
    _check_worlds(parts)
    names, file_maps, file_sizes = _join_files(parts)
    tensors = _join_tensors(parts, ranks, own)
    chosen = [_distinct_chunks(parts, ranks, owners, own) for owners in tensors.values()]
    heads = [(owners[0][0], owners[0][1]) for owners in tensors.values()]
    shapes = [parts[part].shape(row) for part, row in heads]
    joined = CheckpointIndex(
        format=parts[0].format,
        fqns=list(tensors),
        dtype_codes=np.array([parts[part].dtype_codes[row] for part, row in heads], dtype=np.uint8),
        shape_start=starts([len(shape) for shape in shapes]),
        shape_values=np.array([size for shape in shapes for size in shape], dtype=np.int64),
        requires_grad=np.array([parts[part].requires_grad[row] for part, row in heads], dtype=np.uint8),
        chunk_start=starts([len(chunks) for chunks in chosen]),
        **_gather_chunks(parts, file_maps, [chunk for chunks in chosen for chunk in chunks]),
        files=names,
        file_sizes=file_sizes,
        objects=_join_objects(parts, ranks, own, file_maps),
        stride_orders={
            joined_row: parts[part].stride_orders[row]
            for joined_row, (part, row) in enumerate(heads)
            if row in parts[part].stride_orders
        },
        planner_data=_join_planner_data(parts),
        provenance={**parts[0].provenance, **_join_structure(parts)},
        user=parts[0].user,
    )
    joined.check()
    return joined


def _check_worlds(parts: Sequence[CheckpointIndex]) -> None:
    worlds = {part.provenance.get("world_size") for part in parts} - {None}
    if len(worlds) > 1:
        raise CheckpointFormatError(
            f"the ranks' parts are of saves by {' and by '.join(sorted(map(str, worlds)))} ranks: an older "
            "save left its own behind; remove those, and give each save its own id"
        )


def _join_files(parts: Sequence[CheckpointIndex]) -> tuple[list[str], list[Int64], Int64]:
    rows: dict[str, int] = {}
    sizes: list[int] = []
    maps = []
    for part in parts:
        for name, size in zip(part.files, part.file_sizes.tolist(), strict=True):
            row = rows.setdefault(name, len(rows))
            if row == len(sizes):
                sizes.append(size)
            elif UNKNOWN in (sizes[row], size):
                sizes[row] = max(sizes[row], size)
            elif sizes[row] != size:
                raise CheckpointFormatError(f"ranks disagree about the size of {name}", path=name)
        maps.append(np.array([rows[name] for name in part.files], dtype=np.int64))
    return list(rows), maps, np.array(sizes, dtype=np.int64)


def _join_tensors(
    parts: Sequence[CheckpointIndex], ranks: Sequence[int], own: int | None
) -> dict[str, list[tuple[int, int]]]:
    """Where each tensor is described: (position of the index, row in it), in the order of ``parts``."""
    tensors: dict[str, list[tuple[int, int]]] = {}
    for position, part in enumerate(parts):
        for row, fqn in enumerate(part.fqns):
            owners = tensors.setdefault(fqn, [])
            first_position, first_row = owners[0] if owners else (position, row)
            first = parts[first_position]
            if first.dtype_codes[first_row] != part.dtype_codes[row] or first.shape(first_row) != part.shape(
                row
            ):
                if first_position == own:
                    continue
                raise CheckpointFormatError(
                    f"{fqn} is {first.dtype(first_row).name} {first.shape(first_row)} in what rank "
                    f"{ranks[first_position]} saved, and {part.dtype(row).name} {part.shape(row)} in rank "
                    f"{ranks[position]}'s: they are not one checkpoint; load with as many ranks as saved",
                    fqn=fqn,
                    rank=ranks[position],
                )
            owners.append((position, row))
    return tensors


def _distinct_chunks(
    parts: Sequence[CheckpointIndex],
    ranks: Sequence[int],
    owners: Sequence[tuple[int, int]],
    own: int | None,
) -> list[_Chunk]:
    kept: dict[Any, _Chunk] = {}
    for position, row in owners:
        part = parts[position]
        for chunk in part.chunks(row):
            first = kept.setdefault(part.box(chunk), (position, chunk))
            mine, other = part.block_crcs(chunk), parts[first[0]].block_crcs(first[1])
            if first[0] != own and len(mine) and len(other) and not np.array_equal(mine, other):
                raise _mismatch(part.fqns[row], ranks[first[0]], ranks[position])
    return list(kept.values())


def _mismatch(fqn: str, first_rank: int, rank: int) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"ranks {first_rank} and {rank} each saved {fqn} on their own, with different data: one state dict "
        "has room for one of them; load with as many ranks as saved",
        fqn=fqn,
        rank=rank,
    )


def _gather_chunks(
    parts: Sequence[CheckpointIndex], file_maps: Sequence[Int64], chunks: Sequence[_Chunk]
) -> dict[str, Any]:
    """The columns of ``chunks``, in that order, out of the parts' columns laid end to end."""
    first_row = starts([part.chunk_count for part in parts])
    rows = np.array([first_row[position] + chunk for position, chunk in chunks], dtype=np.int64)
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])[rows]
        for name in ("record_offsets", "record_lengths", "payload_offsets", "payload_lengths")
    }
    files = [file_map[part.chunk_files] for file_map, part in zip(file_maps, parts, strict=True)]
    boxes = _ragged(parts, "box_start", rows)
    crcs = _ragged(parts, "crc_start", rows)
    return columns | {
        "chunk_files": np.concatenate(files)[rows],
        "chunk_offsets": np.concatenate([part.chunk_offsets for part in parts])[boxes[1]],
        "chunk_sizes": np.concatenate([part.chunk_sizes for part in parts])[boxes[1]],
        "crc_start": crcs[0],
        "crcs": np.concatenate([part.crcs for part in parts])[crcs[1]],
        "payload_strides": _by_chunk([part.payload_strides for part in parts], chunks),
        "record_crcs": _by_chunk([part.record_crcs for part in parts], chunks),
    }


def _by_chunk(columns: Sequence[Mapping[int, Any]], chunks: Sequence[_Chunk]) -> dict[int, Any]:
    """What the few chunks have that are in a mapping, by their new rows."""
    if not any(columns):
        return {}
    return {
        row: columns[position][chunk]
        for row, (position, chunk) in enumerate(chunks)
        if chunk in columns[position]
    }


def _ragged(
    parts: Sequence[CheckpointIndex], name: str, rows: npt.NDArray[np.int64]
) -> tuple[Int64, npt.NDArray[np.int64]]:
    """New positions of the ragged ``rows``, and where their values are in the parts' values end to end."""
    lengths = np.concatenate([np.diff(getattr(part, name)) for part in parts])
    begins = starts(lengths)[:-1][rows]
    positions = starts(lengths[rows])
    within = np.arange(positions[-1], dtype=np.int64) - np.repeat(positions[:-1], lengths[rows])
    return positions, np.repeat(begins, lengths[rows]) + within


def _join_objects(
    parts: Sequence[CheckpointIndex], ranks: Sequence[int], own: int | None, file_maps: Sequence[Int64]
) -> ObjectColumns:
    owners: dict[str, tuple[int, int]] = {}
    values: dict[bytes, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []
    for position, part in enumerate(parts):
        objects = part.objects
        for row, fqn in enumerate(objects.fqns):
            first = owners.setdefault(fqn, (position, row))
            if first != (position, row):
                if first[0] != own and _objects_differ(parts[first[0]].objects, first[1], objects, row):
                    raise _mismatch(fqn, ranks[first[0]], ranks[position])
                continue
            file, value = int(objects.files[row]), int(objects.plain[row])
            rows.append(
                (
                    int(file_maps[position][file]) if file >= 0 else -1,
                    int(objects.offsets[row]),
                    int(objects.lengths[row]),
                    int(objects.crcs[row]),
                    values.setdefault(objects.values[value], len(values)) if value >= 0 else -1,
                )
            )
    files, offsets, lengths, crcs, plain = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return ObjectColumns(list(owners), files, offsets, lengths, crcs, plain, list(values))


def _objects_differ(first: ObjectColumns, first_row: int, second: ObjectColumns, second_row: int) -> bool:
    """Whether the values certainly differ: plain encodings are canonical, equal records have equal CRCs."""
    plain = int(first.plain[first_row]), int(second.plain[second_row])
    if min(plain) >= 0:
        return first.values[plain[0]] != second.values[plain[1]]
    crcs = int(first.crcs[first_row]), int(second.crcs[second_row])
    return min(crcs) >= 0 and crcs[0] != crcs[1]


def _join_structure(parts: Sequence[CheckpointIndex]) -> dict[str, Any]:
    """All parts' notes on containers; the first one's where they differ."""
    noted = [
        Noted(
            tuple(notes_by_path(part.provenance.get("structure")).values()),
            part.planner_data if isinstance(part.planner_data, Mapping) else {},
        )
        for part in parts
    ]
    return structure_of_notes(join_notes(noted)[0])


def _join_planner_data(parts: Sequence[CheckpointIndex]) -> Any:
    joined: dict[Any, Any] = {}
    for part in parts:
        if isinstance(part.planner_data, Mapping):
            joined |= {fqn: path for fqn, path in part.planner_data.items() if fqn not in joined}
        elif part.planner_data is not None:
            return parts[0].planner_data
    return joined or None
