"""Flatten nested state dicts and restore them, with the keys of stock torch.

Mappings are opened at every level, lists only if they contain a tensor, a mapping or such a list, tuples
never. A flat key is the path joined by dots. torch before 2.4 opened mappings by the rule of lists;
`legacy=True` gives these keys. `PerRank` is opened like a mapping with one key. Names and paths have
strings only; other keys and empty mappings are noted (`dcp.storage.formats.container_notes`).

Tensor subclasses made of other tensors (``__tensor_flatten__``), such as quantized weights of torchao, are
saved as parts: each inner tensor below the tensor's name, plus other facts as plain data. A load fills the
inner tensors of the given subclass and compares the facts.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Replicate

from dcp.planners.layout.local_tensor import DTENSOR, WRAPPER, tensor_kind
from dcp.planners.per_rank import PerRank, rank_key
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import NO_PLAIN_KEY, ContainerNote, note_of, plain_key
from dcp.storage.formats.index import Path
from dcp.storage.near_names import listed
from dcp.storage.torch_compat import StridedShard, local_part

FACTS: Final = "subclass"
"""Last name part of facts of a tensor subclass."""

_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format)


def is_dtensor_of_parts(value: Any) -> bool:
    """Return True if ``value`` is a DTensor of tensors made of parts."""
    return tensor_kind(type(value)) == DTENSOR and tensor_kind(type(local_part(value))) == WRAPPER


def parts_of(fqn: str, value: Any) -> dict[str, Any]:
    """Return the inner tensors by attribute, and `FACTS`, of a tensor subclass or a DTensor of such
    tensors.

    Inner tensors of a DTensor are DTensors with the same sharding.

    Raises:
        PlanError: For facts that are not plain data, inner tensors recreated at each access, and
            differently sharded inner tensors.
    """
    outer = value if isinstance(value, DTensor) else None
    tensor: Any = value if outer is None else local_part(outer)
    if tensor.is_nested:
        raise PlanError(
            f"tensor {fqn!r}: nested tensors cannot be stored; store values() and offsets(), or the tensors "
            "of unbind()",
            fqn=fqn,
        )
    names, context = tensor.__tensor_flatten__()
    parts: dict[str, Any] = {}
    for name in names:
        part = getattr(tensor, name)
        if part is not getattr(tensor, name):
            raise _refused(fqn, tensor, f"its inner tensor {name} is a new object at each access")
        parts[name] = part if outer is None else _divided(fqn, name, part, outer)
    if FACTS in parts:
        raise _refused(fqn, tensor, f"an inner tensor has the reserved name {FACTS!r}")
    shape = tuple(value.shape)
    try:
        facts = {
            "class": _class_name(type(tensor)),
            "dtype": str(tensor.dtype),
            "shape": list(map(int, shape)),
            "context": _plain(context, {tuple(tensor.shape): shape}),
        }
    except (TypeError, RuntimeError, AttributeError) as error:
        raise _refused(fqn, tensor, f"its __tensor_flatten__ context is not plain data ({error})") from error
    return {**parts, FACTS: facts}


def check_facts(fqn: str, own: Mapping[str, Any], stored: Any) -> None:
    """Raise PlanError if the checkpoint's tensor ``fqn`` is of another kind."""
    stored = stored if isinstance(stored, Mapping) else {}
    differs = [name for name in own if name != "class" and stored.get(name) != own[name]]
    names = [str(facts.get("class")).rpartition(".")[2] for facts in (own, stored)]
    if names[0] != names[1]:
        differs.insert(0, "class")
    if differs:
        pairs = [f"{name} {stored.get(name)!r:.200}, not {own[name]!r:.200}" for name in differs]
        raise PlanError(
            f"tensor {fqn.removesuffix('.' + FACTS)!r} has another kind in the checkpoint: "
            f"{'; '.join(pairs)}. Create the model as for the save, with the same quantization",
            fqn=fqn,
        )


def _divided(fqn: str, name: str, part: Any, outer: DTensor) -> Any:
    """Return ``part`` of the local tensor as a DTensor with the same sharding, or unchanged if common to
    all ranks.
    """
    local = local_part(outer)
    placements: Sequence[Any] = outer.placements
    dims = [placement.dim for placement in placements if placement.is_shard()]
    odd = [p for p in placements if not (p.is_shard() or isinstance(p, Replicate))]
    if odd or any(isinstance(placement, StridedShard) for placement in placements):
        raise _refused(fqn, local, f"it has the unsupported placements {outer.placements}")
    along = [dim for dim in dims if dim < part.ndim and part.shape[dim] == local.shape[dim]]
    if len(along) < len(dims):
        if along or part.numel() != 1:
            raise _refused(
                fqn, local, f"the shape {tuple(part.shape)} of {name} does not fit {outer.placements}"
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
        f"tensor {fqn!r} is a {type(tensor).__name__}, a subclass with inner tensors, which cannot be "
        f"stored: {why}. Store the inner tensors under their own names, or dequantize it first",
        fqn=fqn,
    )


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any, shapes: Mapping[tuple[int, ...], tuple[int, ...]]) -> Any:
    """Convert ``value`` to plain data, with shapes of shards replaced by whole shapes."""
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


OTHER, TENSOR, MAPPING, LIST, PER_RANK, _PARTS = range(6)
"""Kinds of values, which decide the flattening (for lists, together with their items). Kinds above TENSOR
may be opened.
"""
_MAX_LISTED = 10
_MAX_SHOWN = 80
_STRINGS = frozenset({str})
_INTEGERS = frozenset({int})
MAX_NESTING = 256
"""Maximum nesting; deeper containers contain themselves or cannot be traversed."""


def _kind_of(cls: type) -> int:
    if issubclass(cls, torch.Tensor):
        return _PARTS if tensor_kind(cls) == WRAPPER else TENSOR
    if issubclass(cls, Mapping):
        return MAPPING
    if issubclass(cls, list):
        return LIST
    return PER_RANK if issubclass(cls, PerRank) else OTHER


kind_of: Final[Callable[[type], int]] = cache(_kind_of)
"""Kind of values by class."""


def is_closed(entries: Iterable[Any], fqn: str = "", depth: int = 0, *, legacy: bool = False) -> bool:
    """Return True if flattening keeps a list with these entries, named ``fqn``, as one value; with
    ``legacy`` also a mapping.
    """
    if depth > MAX_NESTING:
        raise _too_deep(fqn)
    for entry in entries:
        kind = kind_of(type(entry))
        if kind in (TENSOR, PER_RANK, _PARTS) or (kind == MAPPING and not legacy):
            return False
        if kind in (MAPPING, LIST):
            inner = entry.values() if kind == MAPPING else entry
            if not is_closed(inner, fqn, depth + 1, legacy=legacy):
                return False
    return True


@dataclass(eq=False)
class Flat:
    """State dict by flat key: values, paths, container notes, and keys without notes.

    ``foreign_keys`` are types of keys that a checkpoint cannot restore, by flat key. ``per_rank`` are
    `PerRank` values by name, ``owners`` those names by the flat keys inside. ``facts`` are flat keys of
    facts of tensor subclasses. Filled by `flatten`.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    notes: list[ContainerNote] = field(default_factory=list)
    foreign_keys: dict[str, str] = field(default_factory=dict)
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    facts: set[str] = field(default_factory=set)
    duplicates: list[str] = field(default_factory=list)
    rank: int = 0
    legacy: bool = False

    def visit(self, fqn: str, path: Path, value: Any) -> None:
        """Add a value, or its contents."""
        kind = kind_of(type(value))
        if kind > TENSOR and len(path) > MAX_NESTING:
            raise _too_deep(fqn)
        if kind == PER_RANK:
            key, count = rank_key(self.rank), len(self.values)
            self.visit(f"{fqn}.{key}", (*path, key), value.value)
            self.per_rank[fqn] = value  # the outer of nested PerRank values has precedence
            self.owners.update(dict.fromkeys(itertools.islice(self.values, count, None), fqn))
        elif kind == _PARTS:
            self.visit_parts(fqn, path, value)
        elif kind == MAPPING and not (self.legacy and is_closed(value.values(), fqn, legacy=True)):
            self.visit_all(f"{fqn}.", path, value)
        elif kind == LIST and not is_closed(value, fqn, legacy=self.legacy):
            for position, entry in enumerate(value):
                self.visit(f"{fqn}.{position}", (*path, position), entry)
        elif fqn in self.values:
            self.duplicates.append(fqn)
        else:
            self.values[fqn] = value
            self.paths[fqn] = path

    def visit_parts(self, fqn: str, path: Path, value: Any) -> None:
        """Add the parts of a tensor subclass."""
        parts = parts_of(fqn, value)
        facts = parts.pop(FACTS)
        for name, part in parts.items():
            self.visit(f"{fqn}.{name}", (*path, name), part)
        name = f"{fqn}.{FACTS}"
        if name in self.values:
            self.duplicates.append(name)
        self.values[name], self.paths[name] = facts, (*path, FACTS)
        self.facts.add(name)

    def visit_all(self, prefix: str, path: Path, mapping: Mapping[Any, Any]) -> None:
        """Add the entries of a mapping at ``path``, with keys that begin with ``prefix``."""
        flat, paths = self.values, self.paths
        has_only_strings = _STRINGS.issuperset(map(type, mapping))
        all_have_entries = True
        if has_only_strings and mapping and self.add_leaves(prefix, path, mapping):
            return
        for key, entry in mapping.items():
            name = str(key)
            fqn = prefix + name
            # the common case, inlined: a model has many thousands of tensors
            if kind_of(type(entry)) <= TENSOR and fqn not in flat:
                flat[fqn] = entry
                paths[fqn] = (*path, name)
            else:
                count = len(flat)
                self.visit(fqn, (*path, name), entry)
                all_have_entries &= len(flat) > count
        if not (has_only_strings and all_have_entries and mapping):
            self.note(prefix, path, mapping, all_have_entries=all_have_entries)

    def add_leaves(self, prefix: str, path: Path, mapping: Mapping[str, Any]) -> bool:
        """Add the entries of a mapping at once if none is opened; return False otherwise."""
        keys, entries = list(mapping), list(mapping.values())
        if max(map(kind_of, set(map(type, entries)))) > TENSOR or len(keys) != len(entries):
            return False
        fqns = list(map(prefix.__add__, keys)) if prefix else keys
        if not self.values.keys().isdisjoint(fqns):
            return False
        self.values.update(zip(fqns, entries, strict=True) if prefix else mapping)
        self.paths.update(zip(fqns, zip(*map(itertools.repeat, path), keys, strict=False), strict=True))
        return True

    def note(self, prefix: str, path: Path, mapping: Mapping[Any, Any], *, all_have_entries: bool) -> None:
        """Note the keys of a mapping beyond the paths. Keys with equal strings collide."""
        if all_have_entries and mapping and _INTEGERS.issuperset(map(type, mapping)):
            self.notes.append(note_of(path, mapping, all_have_entries=True))
            return
        names = list(map(str, mapping))
        if len(set(names)) < len(names):
            self.duplicates += [prefix + name for name, count in Counter(names).items() if count > 1]
        keys = []
        for key, name in zip(mapping, names, strict=True):
            plain = plain_key(key)
            if plain is NO_PLAIN_KEY:
                self.foreign_keys[prefix + name] = type(key).__name__
            keys.append(name if plain is NO_PLAIN_KEY else plain)
        if not (all_have_entries and keys and _STRINGS.issuperset(map(type, keys))):
            self.notes.append(note_of(path, keys, all_have_entries=all_have_entries))


def _too_deep(fqn: str) -> PlanError:
    name = fqn if len(fqn) <= _MAX_SHOWN else f"{fqn[:_MAX_SHOWN]}..."
    return PlanError(
        f"{name!r} is nested deeper than {MAX_NESTING} levels, or contains itself: flatten it, or remove it "
        "from the state dict",
        fqn=name,
    )


def flatten(state_dict: Mapping[Any, Any], *, rank: int = 0, legacy: bool = False) -> Flat:
    """Return a nested state dict by flat key, in order.

    Args:
        state_dict: Nested state dict.
        rank: Rank that names entries below `PerRank`.
        legacy: Use the keys of torch 2.3 and earlier.

    Raises:
        PlanError: If two entries, or two keys of a mapping, have the same flat key.
    """
    flat = Flat(rank=rank, legacy=legacy)
    flat.visit_all("", (), state_dict)
    if DTENSOR in map(tensor_kind, set(map(type, flat.values.values()))):
        # DTensors of tensor subclasses, detected by their local tensors
        for fqn in [fqn for fqn, value in flat.values.items() if is_dtensor_of_parts(value)]:
            owner, count = flat.owners.pop(fqn, None), len(flat.values) - 1
            flat.visit_parts(fqn, flat.paths.pop(fqn), flat.values.pop(fqn))
            if owner is not None:
                flat.owners.update(dict.fromkeys(itertools.islice(flat.values, count, None), owner))
    if flat.duplicates:
        names = sorted(set(flat.duplicates))
        raise PlanError(
            f"duplicated flatten key {listed(names, most=_MAX_LISTED)} of several entries of the state dict: "
            "rename one of them (a dict key with a dot can collide with a nested key, and 0 with '0')",
            fqns=names[:_MAX_LISTED],
        )
    return flat


def _step(container: Any, key: str | int, default: Callable[[], Any]) -> Any:
    """Return the child of ``container`` at ``key``, created by ``default`` if missing."""
    if isinstance(container, PerRank):
        if container.value is None:
            container.value = default()
        return container.value
    if isinstance(container, Mapping):
        return container.setdefault(key, default()) if key not in container else container[key]  # type: ignore[attr-defined]
    if not isinstance(key, int):
        raise PlanError(
            f"the key {key!r} of the checkpoint does not fit a {type(container).__name__} in the state dict",
            key=key,
        )
    container.extend([None] * (key + 1 - len(container)))
    if container[key] is None:
        container[key] = default()
    return container[key]


def _put(container: Any, key: str | int, value: Any) -> None:
    if isinstance(container, PerRank):
        container.value = value
        return
    if isinstance(key, int) and isinstance(container, list):
        container.extend([None] * (key + 1 - len(container)))
    try:
        container[key] = value
    except TypeError as error:
        raise PlanError(
            f"the state dict has a {type(container).__name__} where the checkpoint has a container with the "
            f"key {key!r}: use a dict or a list",
            key=key,
        ) from error


def set_element(root: Any, path: Path, value: Any, *, replaces: bool = False) -> None:
    """Put ``value`` at ``path`` below ``root``, creating dicts (str keys) and lists (int positions).

    With ``replaces`` the path comes from `flatten`: an existing key of another type (``state[0]`` of an
    optimizer) is found instead of its string.
    """
    container = root
    for key, following in itertools.pairwise(path):
        own = _original_key(container, key) if replaces else key
        container = _step(container, own, dict if isinstance(following, str) else list)
    _put(container, _original_key(container, path[-1]) if replaces else path[-1], value)


def _original_key(container: Any, key: str | int) -> Any:
    """Return the key of a mapping behind the string ``key``; optimizers use integers."""
    if not isinstance(container, Mapping) or key in container:
        return key
    if isinstance(key, str) and key.lstrip("-").isdecimal() and int(key) in container:
        return int(key)
    return next((candidate for candidate in container if str(candidate) == key), key)
