"""Memory for loads: allocates tensors on the meta device, and loads shared memory separately.

Different entries cannot be loaded into shared memory, such as tied weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp.loading.feature import LoadFeature
from dcp.planners.columns import HeldBoxes
from dcp.planners.flatten import FACTS
from dcp.planners.layout.local_tensor import claim_of, with_claim
from dcp.planners.per_rank import PerRank
from dcp.planners.rescale import Rescale
from dcp.storage.engine.memory import Place, repeats_places, share_memory
from dcp.storage.engine.requests import Pieces
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, itemsizes
from dcp.storage.geometry.boxes import BoxSet, overlapping_pairs
from dcp.storage.geometry.strides import Int64, extent
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory, as_copied, narrow
from dcp.storage.torch_compat import ShardedTensor
from dcp.storage.torch_storage.destinations import refuse_shared

_MAX_LISTED = 10
_MOST_BOXES = 4096
_MOST_PAIRS = 1000
"""Above this number, all destinations count as shared, which costs a copy of each."""


class MetaTensors(LoadFeature):
    """Allocate memory for meta tensors in the state."""

    name = "meta"

    def state(self) -> None:
        """Replace them in the state dict. Raises PlanError for a part of a composite tensor."""
        call = self.call
        chosen = call.selected(call.flat.values)
        if not any(map(_is_meta, chosen.values())):
            return
        names = []
        for fqn, value in list(chosen.items()):
            if self._may_be_kept(fqn):  # a kept value must not be replaced by uninitialized memory
                continue
            real = _materialise(value)
            if real is not value:
                self._check_place(fqn)
                call.put(fqn, real)
                names.append(fqn)
        self.new = names
        call.flat = call.flattened()

    def _may_be_kept(self, fqn: str) -> bool:
        """Test for a `PerRank` entry that a load may keep."""
        flat = self.call.flat
        own = flat.per_rank.get(flat.owners.get(fqn, ""))
        return own is not None and (
            own.rule == "keep" if isinstance(own, Rescale) else self.call.options.per_rank == "keep"
        )

    def _check_place(self, fqn: str) -> None:
        """Raise PlanError for a part of a tensor without memory, which cannot be replaced."""
        name = next((each for each in self.call.flat.facts if fqn.startswith(each.removesuffix(FACTS))), None)
        if name is not None:
            raise PlanError(
                f"{name.removesuffix('.' + FACTS)!r} is a tensor subclass with inner tensors on the meta "
                "device: materialize it before the load",
                fqn=fqn,
            )


def _is_meta(value: Any) -> bool:
    if isinstance(value, ShardedTensor):  # reading attributes of this class logs deprecation warnings
        return any(shard.tensor.is_meta for shard in value.local_shards())
    return isinstance(value, torch.Tensor) and value.is_meta


def _device(mesh: DeviceMesh | None) -> torch.device:
    """Return the device of new tensors: the mesh's, else the process group's; CPU for gloo alone."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    together = dist.is_available() and dist.is_initialized() and dist.get_backend() != "gloo"
    kind = mesh.device_type if mesh is not None else accelerator.type if accelerator and together else "cpu"
    if kind == "cpu" or accelerator is None:
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def _materialise(value: Any) -> Any:
    """Replace every meta tensor in ``value`` by an uninitialised one.

    Dicts, lists and `PerRank` are changed in place; tuples are replaced as needed.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            return value
        if isinstance(value, ShardedTensor):
            raise PlanError("cannot load into a ShardedTensor on the meta device: materialize it first")
        if not isinstance(value, DTensor):
            return with_claim(torch.empty_like(value, device=_device(None)), claim_of(value))
        mesh = value.device_mesh
        with torch.no_grad():
            local = torch.empty_like(value.to_local(), device=_device(mesh))
        # shape and stride explicitly, because an uneven local shape does not tell them
        size, stride = value.size(), value.stride()
        return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=size, stride=stride)
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = _materialise(entry)
    elif isinstance(value, list):
        value[:] = [_materialise(entry) for entry in value]
    elif isinstance(value, PerRank):
        value.value = _materialise(value.value)
    elif isinstance(value, tuple):
        entries = [_materialise(entry) for entry in value]
        if any(new is not old for new, old in zip(entries, value, strict=True)):
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    return value


# -- memory with several names -------------------------------------------------------------------------------


class _SharedBox(NamedTuple):
    """A destination box that shares memory with ``fqns``, and its loaded copy.

    ``is_filled``: another entry loads the same elements.
    """

    fqns: Sequence[str]
    target: torch.Tensor
    loaded: torch.Tensor
    is_filled: bool


class _FilledBox(NamedTuple):
    """The part filled by one row of a load plan: chunk, offsets in chunk and destination, sizes."""

    chunk: int
    stored: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SharedMemory(LoadFeature):
    """Load shared memory into separate copies, compare them, and store the result."""

    name = "shared_memory"
    _shared: Sequence[_SharedBox] = ()

    def boxes(
        self, memory: LocalMemory, pieces: Pieces, index: CheckpointIndex, held: HeldBoxes
    ) -> LocalMemory:
        """Return the memory to load into, with copies in place of shared destinations.

        Tied weights with one stored payload need no copies. Raises PlanError for destinations whose own
        elements overlap.
        """
        self._shared = ()
        groups = _groups(pieces, memory, held)
        if not groups:
            return memory
        tensors, shared = list(memory.tensors), list[_SharedBox]()
        order = np.argsort(pieces.dests, kind="stable")
        begins = np.searchsorted(pieces.dests[order], np.arange(len(tensors) + 1))
        for group in groups:
            boxes = {dest: _boxes(pieces, order[begins[dest] : begins[dest + 1]]) for dest in group}
            is_same = len({_view_of(tensors[dest]) for dest in group}) == 1
            if is_same and len({_source(index, boxes[dest]) for dest in group}) == 1:
                continue
            group = sorted(group) if is_same else _sharing(tensors, group)
            if is_same:
                filled = [sum(prod(box.sizes) for box in boxes[dest]) for dest in group]
                is_same = filled == [tensors[dest].numel() for dest in group]
            fqns = [_fqn(held, dest) for dest in group]
            for dest in group[1:] if is_same else group:
                target = tensors[dest]
                loaded = tensors[dest] = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                for box in boxes[dest]:
                    own, other = (
                        narrow(tensor.detach(), box.offsets, box.sizes) for tensor in (target, loaded)
                    )
                    shared.append(_SharedBox(fqns, own, other, is_same))
        self._shared = shared
        return LocalMemory.of(tensors) if shared else memory

    @torch.inference_mode()
    def put(self) -> None:
        """Store the copies. Raises PlanError if entries of the same memory differ."""
        shared, self._shared = self._shared, ()
        if not shared:
            return
        for each in shared:
            if not each.is_filled:
                as_copied(each.target).copy_(as_copied(each.loaded))
        differing = {
            tuple(each.fqns) for each in shared if not torch.equal(_bytes(each.target), _bytes(each.loaded))
        }
        if differing:
            shown = "; ".join(listed(fqns, most=_MAX_LISTED) for fqns in sorted(differing)[:_MAX_LISTED])
            raise PlanError(
                f"entries share memory in the state dict, but have different values in the checkpoint: "
                f"{shown}. Load into tensors that do not share memory (clone()), or exclude one of the "
                f"entries (exclude=...)",
                fqns=[fqn for fqns in sorted(differing) for fqn in fqns][:_MAX_LISTED],
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as bytes, because NaN is not equal to itself."""
    dense = as_copied(tensor).resolve_conj().resolve_neg().cpu().contiguous()
    # any stride is valid for a single element
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _boxes(pieces: Pieces, rows: Int64) -> list[_FilledBox]:
    """Return the parts filled by ``rows`` of a load plan."""
    found = list[_FilledBox]()
    for row in rows.tolist():
        box = slice(int(pieces.box_start[row]), int(pieces.box_start[row + 1]))
        stored, offsets, sizes = (
            tuple(each[box].tolist())
            for each in (pieces.storage_offsets, pieces.dest_offsets, pieces.lengths)
        )
        found.append(_FilledBox(int(pieces.chunks[row]), stored, offsets, sizes))
    return found


def _source(index: CheckpointIndex, boxes: Sequence[_FilledBox]) -> Any:
    """Return a key, equal for destinations of the same stored elements at the same positions."""
    chunks = [box.chunk for box in boxes]
    places = (index.chunk_files, index.record_offsets, index.payload_offsets)
    return (
        *(place[chunks].tobytes() for place in places),
        *(index.payload_strides.get(chunk) for chunk in chunks),
        *(each for box in boxes for each in (box.stored, box.offsets, box.sizes)),
    )


def _groups(pieces: Pieces, memory: LocalMemory, wanted: HeldBoxes) -> list[list[int]]:
    """Return group numbers of destinations with overlapping extents."""
    dests = np.flatnonzero(np.bincount(pieces.dests, minlength=len(memory.tensors)))
    sizes = (memory.volumes * itemsizes(memory.dtype_codes))[dests]
    for position in np.flatnonzero(~memory.is_plain[dests]).tolist():
        tensor = memory.tensors[dests[position]]
        if not tensor.is_contiguous():
            if repeats_places(tensor.shape, tensor.stride()):
                refuse_shared(_fqn(wanted, int(dests[position])), tensor)
            sizes[position] = extent(tensor.shape, tensor.stride()) * tensor.element_size()
    dests, sizes = dests[sizes > 0], sizes[sizes > 0]
    begins = memory.pointers[dests]
    order = np.argsort(begins, kind="stable")
    dests, begins = dests[order], begins[order]
    is_apart = begins[1:] >= np.maximum.accumulate(begins + sizes[order])[:-1]
    if is_apart.all():
        return []
    groups = np.split(dests, np.flatnonzero(is_apart) + 1)
    return [group.tolist() for group in groups if len(group) > 1]


def _sharing(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> list[int]:
    """Return members of ``group`` that share memory; interleaved ones may not."""
    numbers = np.sort(group)
    if len(numbers) > _MOST_BOXES:
        return list(numbers.tolist())
    places = [_place(tensors[number]) for number in numbers.tolist()]
    boxes = _boxes_of_one(tensors[numbers[0]].untyped_storage().data_ptr(), places)
    if boxes is not None:
        found = np.unique(overlapping_pairs(boxes))
    elif len(places) * len(places) > 2 * _MOST_PAIRS:
        found = np.arange(len(places))
    else:
        pairs = combinations(range(len(places)), 2)
        found = np.unique([pair for pair in pairs if share_memory(*(places[at] for at in pair))])
    return list(numbers[found.astype(np.int64)].tolist())


def _boxes_of_one(address: int, places: Sequence[Place]) -> BoxSet | None:
    """Return byte boxes of slices in one larger tensor at ``address``; None for other shapes."""
    if len({place.strides for place in places}) > 1:
        return None
    steps = np.array([*places[0].strides, 1], np.int64)
    order = np.argsort(-steps, kind="stable")
    steps = steps[order]
    if not steps.all() or (steps[:-1] % steps[1:]).any():
        return None
    sizes = np.array([(*place.sizes, place.itemsize) for place in places], np.int64)[:, order]
    at = np.array([place.address for place in places], np.int64)[:, None] - address
    low = at // steps
    low[:, 1:] %= steps[:-1] // steps[1:]
    if ((low + sizes)[:, 1:] > steps[:-1] // steps[1:]).any():
        return None
    return BoxSet(np.zeros(len(places), np.int64), low, low + sizes)


def _place(tensor: torch.Tensor) -> Place:
    size = tensor.element_size()
    return Place(tensor.data_ptr(), size, tuple(tensor.shape), tuple(step * size for step in tensor.stride()))


def _view_of(tensor: torch.Tensor) -> Any:
    return _place(tensor), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _fqn(wanted: HeldBoxes, dest: int) -> str:
    return wanted.fqns[int(wanted.item_tensors[np.flatnonzero(wanted.item_sources == dest)[0]])]
