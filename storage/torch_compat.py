"""Undocumented names of torch: private names, and names missing in some versions.

No other module uses such names (tests/project/test_torch_names.py). Each has a fallback: a slower public
alternative or, for tensor kinds, a class without instances. Untested versions of torch work as far as
possible, with a warning.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["AsyncCollectiveTensor", "Shard", "ShardedTensor", "StorageInfo", "StridedShard"]

TESTED: Final = ((2, 10), (2, 15))
"""Oldest and newest version that passes `make test-torch`."""


class UntestedTorchWarning(UserWarning):
    """This version of torch was not tested."""


def _release(version: str) -> tuple[int, int]:
    """Return major and minor number, also of a pre-release."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)


VERSION: Final = _release(torch.__version__)


def warn_if_untested(version: str) -> None:
    """Warn about a version of torch outside of the tested range."""
    oldest, newest = TESTED
    if oldest <= _release(version) <= newest:
        return
    warnings.warn(
        f"torch {version} was not tested with this dcphub (tested: torch {oldest[0]}.{oldest[1]} to "
        f"{newest[0]}.{newest[1]}): test a load of your checkpoints before you rely on them",
        UntestedTorchWarning,
        stacklevel=2,
    )


warn_if_untested(torch.__version__)  # once a process, as modules are imported once


# -- classes and functions by name ---------------------------------------------------------------------------


def _found(path: str, otherwise: Any) -> Any:
    """Return the object at ``path`` in this torch, or ``otherwise``."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return otherwise


def _class(path: str) -> Any:
    """Return a class of torch, or a class without instances."""
    return _found(path, None) or type(path.rpartition(".")[2].lstrip("_"), (), {})


@dataclasses.dataclass
class _OwnStorageInfo:
    relative_path: str
    offset: int
    length: int


if not TYPE_CHECKING:
    AsyncCollectiveTensor = _class("torch.distributed._functional_collectives.AsyncCollectiveTensor")
    Shard = _class("torch.distributed._shard.sharded_tensor.shard.Shard")
    ShardedTensor = _class("torch.distributed._shard.sharded_tensor.api.ShardedTensor")
    StorageInfo = _found("torch.distributed.checkpoint.filesystem._StorageInfo", _OwnStorageInfo)
    StridedShard = _class("torch.distributed.tensor.placement_types._StridedShard")

flatten_sharded_tensors: Callable[[dict[str, Any]], dict[str, Any]] = _found(
    "torch.distributed.checkpoint._sharded_tensor_utils._flatten_sharded_tensors", lambda flat: flat
)
"""Flattens nested ShardedTensors (FSDP1 over tensor parallelism); unflattened ones are refused."""

preserved_versions: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[object]] = _found(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter", lambda tensors: nullcontext()
)
"""Context in which tensors change without autograd's notice; without it, an earlier backward is refused."""


# -- plain tensors -------------------------------------------------------------------------------------------


use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", None) or (lambda tensor: 1)
"""Number of references to a tensor, all of Python's counted as one; without it, 1."""


def _copy_each(
    targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor], *, non_blocking: bool = False
) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


copy_tensors: Callable[..., None] = getattr(torch, "_foreach_copy_", _copy_each)
"""Copies lists of tensors, ``(targets, sources, non_blocking=)``."""


_HAS_STRIDES = "strides" in {field.name for field in dataclasses.fields(TensorProperties)}  # from 2.15 on


def tensor_properties(
    dtype: torch.dtype, requires_grad: bool, strides: Sequence[int] | None
) -> TensorProperties:
    """Return the properties that torch's planner stores for a tensor with a local part of these strides."""
    properties = TensorProperties(dtype=dtype, requires_grad=requires_grad)
    if _HAS_STRIDES:
        properties.strides = None if strides is None else tuple(strides)  # type: ignore[attr-defined]
    return properties


def strides_of(properties: TensorProperties) -> Sequence[int] | None:
    """Return the strides given to `tensor_properties`, if this torch keeps them."""
    return getattr(properties, "strides", None)


# -- DTensors and their meshes -------------------------------------------------------------------------------

local_part: Callable[[DTensor], torch.Tensor] = (
    attrgetter("_local_tensor") if hasattr(DTensor, "_local_tensor") else DTensor.to_local
)
"""Returns the local tensor like `DTensor.to_local`, without autograd and new Parameters."""


def copies_in_state(state: Mapping[str, Any]) -> list[str]:
    """Return names in a module's ``state_dict()`` whose tensors share no memory with the module, as created
    by hooks.

    Empty if no entry shares memory (the module is gone) or this torch does not count references.
    """
    count_holders = getattr(torch._C, "_storage_Use_Count", None)
    if not hasattr(state, "_metadata") or count_holders is None:
        return []
    own: dict[int, set[int]] = {}  # by storage, the tensors in the state dict, and their bases
    names: dict[int, list[str]] = {}
    kept: list[Any] = []  # distinct ids
    for name, value in state.items():
        tensor = local_part(value) if isinstance(value, DTensor) else value
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
            continue
        if isinstance(value, nn.Parameter):
            return []  # parameters of the module, due to keep_vars=True
        storage = tensor.untyped_storage()
        holders = [each for each in (tensor, tensor._base) if each is not None]
        kept += [storage, *holders]
        own.setdefault(storage._cdata, set()).update(map(id, holders))
        names.setdefault(storage._cdata, []).append(name)
    copies = [
        storage for storage, holders in own.items() if count_holders(storage) == len(holders) + _PYTHONS_OWN
    ]
    return [name for one in copies for name in names[one]] if len(copies) < len(own) else []


_PYTHONS_OWN: Final = 1
"""Reference count of a storage's Python object."""


def _public_spec(tensor: DTensor) -> Any:
    return SimpleNamespace(
        mesh=tensor.device_mesh, placements=tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


spec_of: Callable[[DTensor], Any] = attrgetter("_spec") if hasattr(DTensor, "_spec") else _public_spec
"""Returns mesh, placements, shape and stride of a DTensor, without its memory."""


def shard_order(spec: Any) -> Sequence[Any]:
    """Return the order of mesh dimensions that shard each tensor dimension; empty for left to right.

    `StridedShard` states the order in 2.11 and newer (``use_strided_shard_as_shard_order``).
    """
    by_placements = getattr(spec, "use_strided_shard_as_shard_order", None)
    if by_placements is None:
        by_placements = any(isinstance(placement, StridedShard) for placement in spec.placements)
    return () if by_placements else getattr(spec, "shard_order", None) or ()


def dtensor_with(spec: Any, local: torch.Tensor) -> DTensor:
    """Return a DTensor without gradients from a `spec_of` and a local part."""
    if isinstance(spec, SimpleNamespace):
        return _from_local(local, spec.mesh, spec.placements, spec.shape, spec.stride)
    build: Callable[..., DTensor] = DTensor
    return build(local, spec, requires_grad=False)


def dtensor_parts(tensor: DTensor) -> tuple[Any, ...]:
    """Return the parts for `dtensor_of_parts` in another process."""
    return (
        local_part(tensor),
        tensor.device_mesh,
        tensor.placements,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tuple(shard_order(spec_of(tensor))),
    )


def dtensor_of_parts(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    order: tuple[Any, ...],
) -> DTensor:
    """Return a DTensor over a mesh without process groups."""
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    except ImportError:
        return _from_local(local, mesh, placements, shape, stride)
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), meta)
    if order:
        spec.shard_order = order
    build: Callable[..., DTensor] = DTensor
    return build(local, spec, requires_grad=local.requires_grad)


def _from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def mesh_parts(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return the parts for `mesh_of_parts` in another process."""
    return mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names, _rank_in(mesh)


def _rank_in(mesh: DeviceMesh) -> int:
    if hasattr(mesh, "_rank"):  # from 2.11 on
        return mesh._rank
    place = mesh.get_coordinate()
    return int(mesh.mesh[tuple(place)]) if place is not None else -1  # -1: outside of the mesh


def mesh_of_parts(device_type: str, mesh: Any, names: tuple[str, ...] | None, rank: int) -> DeviceMesh:
    """Return a mesh without process groups that knows this rank's coordinates."""
    return DeviceMesh(device_type, mesh, mesh_dim_names=names, _init_backend=False, _rank=rank)


# -- ShardedTensors ------------------------------------------------------------------------------------------


def group_of_sharded(tensor: ShardedTensor) -> Any:
    """Return the process group whose ranks hold the shards."""
    return tensor._process_group


def sharded_with(group: Any, local: list[Shard], metadata: Any) -> ShardedTensor:
    """Return a ShardedTensor of ``local`` shards over ``group``."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, sharded_tensor_metadata=metadata, process_group=group, init_rrefs=False
    )


def on_cpu(placement: Any) -> Any:
    """Return the placement of a rank's shard on its CPU."""
    return type(placement)(f"rank:{placement.rank()}/cpu")


def sharded_parts(tensor: ShardedTensor) -> tuple[Any, ...]:
    """Return the parts for `sharded_of_parts` in another process."""
    return tensor.local_shards(), tensor.metadata(), tensor.sharding_spec()


def sharded_of_parts(shards: list[Shard], metadata: Any, spec: Any) -> ShardedTensor:
    """Return a sharded tensor without a process group; torch's own pickling needs the original group."""
    properties = metadata.tensor_properties
    base = import_module("torch.distributed._shard.sharded_tensor.api").ShardedTensorBase
    made: ShardedTensor = base.__new__(
        ShardedTensor,
        spec,
        *metadata.size,
        dtype=properties.dtype,
        layout=properties.layout,
        pin_memory=False,
        requires_grad=properties.requires_grad,
    )
    made._local_shards, made._metadata, made._sharding_spec = shards, metadata, spec
    made.__dict__.update(_process_group=None, _init_rrefs=False, _sharded_tensor_id=None)
    return made


# -- flat parameters of FSDP1 --------------------------------------------------------------------------------


class FlatSlice(NamedTuple):
    """Part of a parameter of ``module`` in the flat parameter ``flat`` on this rank.

    The ``length`` elements at ``begin`` are elements ``offset`` and following of the parameter with
    ``shape`` and ``strides``. ``parameter`` is a view of them; None if the module has the flat parameter
    instead.
    """

    flat: nn.Parameter
    parameter: nn.Parameter | None
    module: nn.Module
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    offset: int
    length: int
    is_whole: bool
    """True if the shape is the whole tensor's, not a tensor-parallel part."""


def flat_slices(model: nn.Module) -> list[FlatSlice] | None:
    """Return the parts of all parameters flattened by FullyShardedDataParallel; None if unknown to this
    torch.
    """
    handles_of = _found("torch.distributed.fsdp._traversal_utils._get_fsdp_handles", None)
    try:
        return [one for handle in handles_of(model) for one in _slices_of(handle.flat_param)]
    except (AttributeError, TypeError):
        return None


def _slices_of(flat: Any) -> Iterable[FlatSlice]:
    parameters = flat._params or [None] * len(flat._param_infos)
    rows = (parameters, flat._param_infos, flat._shapes, flat._strides, flat._shard_param_infos)
    for row, (parameter, info, shape, strides, part) in enumerate(zip(*rows, strict=True)):
        begin, offset, length = part.intra_param_start_idx, part.offset_in_shard, part.numel_in_shard
        yield FlatSlice(
            flat,
            parameter,
            info.module,
            info.param_name,
            tuple(shape),
            tuple(strides),
            begin or 0,
            offset or 0,
            length or 0,
            flat._param_extensions[row] is None,
        )


# -- process groups ------------------------------------------------------------------------------------------


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices with a backend in a process group."""
    try:
        return [torch.device(device) for device in group._device_types]
    except AttributeError:
        pairs = str(dist.get_backend_config(group)).split(",")
        return [torch.device(pair.partition(":")[0]) for pair in pairs]


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for a device; the group itself for a single backend."""
    return getattr(group, "_get_backend", lambda device: group)(device)


def set_default_timeout(group: Any, timeout: Any) -> None:
    """Set the timeout of a group's collectives, if supported."""
    getattr(group, "_set_default_timeout", lambda timeout: None)(timeout)


def all_process_groups() -> list[Any]:
    """Return the process groups known to `torch.distributed`."""
    return [*getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ())]


# -- storages of torch's own ---------------------------------------------------------------------------------


def weight_scales(reader: Any) -> set[str]:
    """Return the names of scales with which torch's quantized reader computes other tensors."""
    return set(getattr(reader, "_weight_scale_mapping", {}).values())


def stock_fsspec_storages() -> tuple[Any, Any]:
    """Return torch's FsspecReader and FsspecWriter, in a public module from 2.15."""
    package = "torch.distributed.checkpoint"
    name = "fsspec_filesystem" if VERSION >= (2, 15) else "_fsspec_filesystem"
    module = import_module(f"{package}.{name}")
    return module.FsspecReader, module.FsspecWriter
