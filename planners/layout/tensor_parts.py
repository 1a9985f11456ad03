"""Tensor subclasses that are made of other tensors, by torch's protocol for them (``__tensor_flatten__``).

Quantised weights of torchao are an example. They are saved and loaded as their parts: each inner tensor under
a name of its own below theirs, and beside these the other facts of the tensor, as plain data. A load fills
the inner tensors of a given subclass, and compares the facts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Replicate

from dcp.planners.layout.local_tensor import DTENSOR, KINDS, WRAPPER
from dcp.storage.errors import PlanError
from dcp.storage.torch_compat import StridedShard, local_part

__all__ = ["FACTS", "check_facts", "is_dtensor_of_parts", "parts_of"]

FACTS: Final = "subclass"
"""The last part of the name of the facts that are no tensor."""

_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format)


def is_dtensor_of_parts(value: Any) -> bool:
    """Test whether ``value`` is a DTensor of such tensors."""
    return KINDS[type(value)] == DTENSOR and KINDS[type(local_part(value))] == WRAPPER


def parts_of(fqn: str, value: Any) -> dict[str, Any]:
    """Give the inner tensors of such a tensor, or of a DTensor of them, by attribute, and `FACTS`.

    Those of a DTensor are DTensors where they are divided as it is. Raises PlanError for facts that are no
    plain data, for inner tensors that are made anew at each access, so that values loaded into them are lost,
    and for those that are divided otherwise than the DTensor.
    """
    outer = value if isinstance(value, DTensor) else None
    tensor: Any = value if outer is None else local_part(outer)
    if tensor.is_nested:
        raise PlanError(
            f"tensor {fqn!r}: nested tensors cannot be stored; store its values() and offsets(), or what "
            "unbind() gives",
            fqn=fqn,
        )
    names, context = tensor.__tensor_flatten__()
    parts: dict[str, Any] = {}
    for name in names:
        part = getattr(tensor, name)
        if part is not getattr(tensor, name):
            raise _refused(fqn, tensor, f"its {name} is made anew at each access")
        parts[name] = part if outer is None else _divided(fqn, name, part, outer)
    if FACTS in parts:
        raise _refused(fqn, tensor, f"one of its inner tensors is called {FACTS!r}")
    shape = tuple(value.shape)
    try:
        facts = {
            "class": _class_name(type(tensor)),
            "dtype": str(tensor.dtype),
            "shape": list(map(int, shape)),
            "context": _plain(context, {tuple(tensor.shape): shape}),
        }
    except (TypeError, RuntimeError, AttributeError) as error:
        raise _refused(fqn, tensor, f"its other facts are no plain data ({error})") from error
    return {**parts, FACTS: facts}


def check_facts(fqn: str, own: Mapping[str, Any], stored: Any) -> None:
    """Raise PlanError where the checkpoint's tensor ``fqn`` is of another kind than the one to fill."""
    stored = stored if isinstance(stored, Mapping) else {}
    differs = [name for name in own if name != "class" and stored.get(name) != own[name]]
    names = [str(facts.get("class")).rpartition(".")[2] for facts in (own, stored)]
    if names[0] != names[1]:
        differs.insert(0, "class")
    if differs:
        pairs = [f"{name} {stored.get(name)!r:.200}, not {own[name]!r:.200}" for name in differs]
        raise PlanError(
            f"tensor {fqn.removesuffix('.' + FACTS)!r}: the checkpoint has another one, and its parts would "
            f"be read as other values: {'; '.join(pairs)}. Make the model as it was when it was saved, "
            "quantised alike",
            fqn=fqn,
        )


def _divided(fqn: str, name: str, part: Any, outer: DTensor) -> Any:
    """Make of ``part`` of this rank's local tensor a DTensor that is divided along the same dimensions, or
    give it as it is where it is one value for all ranks."""
    local = local_part(outer)
    placements: Sequence[Any] = outer.placements
    dims = [placement.dim for placement in placements if placement.is_shard()]
    odd = [p for p in placements if not (p.is_shard() or isinstance(p, Replicate))]
    if odd or any(isinstance(placement, StridedShard) for placement in placements):
        raise _refused(fqn, local, f"it is divided as {outer.placements}")
    along = [dim for dim in dims if dim < part.ndim and part.shape[dim] == local.shape[dim]]
    if len(along) < len(dims):
        if along or part.numel() != 1:
            raise _refused(
                fqn, local, f"its {name} of shape {tuple(part.shape)} is not divided as {outer.placements}"
            )
        return part
    shape = list(part.shape)
    for dim in dims:
        shape[dim] = outer.shape[dim]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, outer.device_mesh, outer.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _refused(fqn: str, tensor: torch.Tensor, why: str) -> PlanError:
    return PlanError(
        f"tensor {fqn!r} is a {type(tensor).__name__}, a subclass made of inner tensors, and {why}. Store "
        "these under names of their own, or dequantise it first",
        fqn=fqn,
    )


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any, shapes: Mapping[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Convert ``value`` to plain data, with each of ``shapes`` replaced: that of a shard by the whole's."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, torch.device):
        return None  # the same tensor on any device
    if isinstance(value, tuple | list):
        if all(type(item) is int for item in value):
            return list(shapes.get(tuple(value), value))
        return [_plain(item, shapes) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, shapes) for key, item in value.items()}
    if isinstance(value, type):
        return _class_name(value)
    if is_dataclass(value):
        named = {each.name: _plain(getattr(value, each.name), shapes) for each in fields(value)}
        return {"class": type(value).__qualname__, **named}
    raise TypeError(f"a {type(value).__name__}")
