"""Weight maps of transformers' own conversions (`WeightRenaming`, `WeightConverter`), of version 5.

Those are regular expressions on parts of names, and operations on tensors; the names and shapes of a
checkpoint say which tensors they apply to. The objects of the library rename, and say what they do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dcp.calls.plain_errors import plain_errors
from dcp.planners.weight_maps.axes import model_config
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import OptionError, PlanError
from dcp.storage.formats.opening import complete_index, open_source
from dcp.storage.stores.opening import OpenWith

__all__ = ["map_of_conversions", "transformers_map"]


@plain_errors
def transformers_map(
    source: str | os.PathLike[str],
    conversions: Sequence[Any] | Any = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> WeightMap:
    """Make a map from the weights that a checkpoint has to those of the model that transformers makes of
    it.

    The rules are those that transformers has for the model, of the names in this checkpoint: experts that are
    stacked, queries and keys that are fused or permuted. Nothing is read of the tensors.

    Args:
        source: A checkpoint of any format, path or URL; a folder of transformers' has the model's
            ``config.json``.
        conversions: A model of transformers', or `WeightRenaming` and `WeightConverter` objects; without
            them those for the ``config.json``'s architecture or model type.
        storage_options: Of the file system of the source's URL.

    Raises:
        OptionError: transformers is not installed, or knows nothing of the model.
        PlanError: Operations that a map cannot say, by name.
    """
    found = open_source(source, open_store=OpenWith(storage_options))
    index = complete_index(found.store, found.index)
    config = model_config(found.store)
    if conversions is None:
        conversions = _of_config(config)
    elif hasattr(conversions, "named_modules"):
        conversions = _conversion_mapping().get_model_conversion_mapping(conversions)
    shapes = {name: index.shape(row) for row, name in enumerate(index.fqns)}
    return map_of_conversions(conversions, shapes).with_config(config)


def _conversion_mapping() -> Any:
    try:
        from transformers import conversion_mapping
    except ImportError as error:
        raise OptionError("transformers 5 or newer is not installed, whose conversions these are") from error
    return conversion_mapping


def _of_config(config: Mapping[str, Any]) -> Sequence[Any]:
    mapping = _conversion_mapping()
    names = [*(config.get("architectures") or ()), config.get("model_type")]
    for name in names:
        found = mapping.get_checkpoint_conversion_mapping(name) if isinstance(name, str) else None
        if found is not None:
            return [*found, *mapping.get_checkpoint_conversion_mapping("legacy")]
    shown = " or ".join(repr(name) for name in names if name) or "a model without config.json"
    raise OptionError(f"transformers has no conversions for {shown}: its weights are those of the checkpoint")


# -- conversions as rules ------------------------------------------------------------------------------------


_NUMBER: Final = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
_MAX_LISTED: Final = 5

_Dims = list[str]


def map_of_conversions(conversions: Sequence[Any], tensors: Mapping[str, tuple[int, ...]]) -> WeightMap:
    """Make a map of ``conversions`` of a checkpoint of ``tensors`` (shapes by name).

    PlanError that names the operations that a map cannot say.
    """
    renamings = [each for each in conversions if not hasattr(each, "operations")]
    converters = [each for each in conversions if hasattr(each, "operations")]
    rules: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[int, str], _Group] = {}
    for fqn, shape in sorted(tensors.items()):  # as transformers goes through them
        key = fqn
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        for number, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(key)
            if pattern is not None:
                group = groups.setdefault((number, target), _Group(converter, target))
                group.members.setdefault(pattern, []).append((fqn, key, shape))
                break
        else:
            rule = {"from": _varied(fqn), "to": _varied(key, like=fqn)}
            rules.setdefault(repr(rule), rule)
    problems: list[str] = []
    counts: dict[int, set[int]] = {}
    for (number, _), group in groups.items():
        counts.setdefault(number, set()).add(group.count)
    for (number, _), group in groups.items():
        try:
            rule = group.rule(is_counted=len(counts[number]) == 1)
            rules.setdefault(repr(rule), rule)
        except PlanError as error:
            problems.append(str(error))
    if problems:
        shown = list(dict.fromkeys(problems))
        more = f"; and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
        raise PlanError(
            f"conversions of transformers that no map can say: {'; '.join(shown[:_MAX_LISTED])}{more}"
        )
    return WeightMap.from_data({"name": "transformers", "rules": list(rules.values())})


def _varied(fqn: str, like: str | None = None) -> str:
    """Return the name with its numbers as parts that vary, where ``like`` has the same ones."""
    if "{" in fqn or "}" in fqn:
        raise PlanError(f"{fqn!r} has braces, which a map's names cannot have")
    if like is not None and _NUMBER.findall(fqn) != _NUMBER.findall(like):
        return fqn if not _NUMBER.search(like) else _same(fqn, like)
    numbers = iter(range(len(fqn)))
    return _NUMBER.sub(lambda _: f"{{n{next(numbers)}}}", fqn)


def _same(fqn: str, like: str) -> str:
    raise PlanError(f"{like!r} becomes {fqn!r}, whose numbers are others")


@dataclass
class _Group:
    """Tensors that one converter makes into one target, or several: by source pattern (name, the name it
    has when the converter meets it, shape)."""

    converter: Any
    target: str
    members: dict[str, list[tuple[str, str, tuple[int, ...]]]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of tensors in a list."""
        return max((len(found) for pattern, found in self.members.items() if "*" in pattern), default=0)

    def rule(self, *, is_counted: bool) -> dict[str, Any]:
        """Return it as a rule of a map, which says how many there are of a list where all groups have as
        many."""
        tensors: dict[str, _DeclaredTensor] = {}
        sources: dict[str, str] = {}
        texts: dict[str, str] = {}  # of axes that are made of several
        sizes: dict[str, Any] = {"item": self.count} if is_counted and self.count else {}
        patterns = [pattern for pattern in self.converter.source_patterns if pattern in self.members]
        for number, pattern in enumerate(patterns):
            found = self.members[pattern]
            dims = [f"s{number}_{dim}" for dim in range(len(found[0][2]))]
            sources[pattern] = self._name(pattern, found)
            tensors[pattern] = _DeclaredTensor(dims, found[0][2], is_list="*" in pattern)
        work = _Work(self.converter, tensors, texts, sizes)
        own = {pattern: list(tensor.dims) for pattern, tensor in tensors.items()}
        for operation in self.converter.operations:
            work.apply(operation)
        made = {self._target_name(key): tensor for key, tensor in work.tensors.items()}
        if any(tensor.is_list for tensor in made.values()):
            raise PlanError(f"{_described(self.converter)}: a list of tensors is left")
        like = next(iter(self.members.values()))[0][0]
        return {
            "from": {sources[pattern]: work.text(dims) for pattern, dims in own.items()},
            "to": {self._varied_target(name, like): work.text(tensor.dims) for name, tensor in made.items()},
            "sizes": sizes,
        }

    def _name(self, pattern: str, found: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
        fqn, key, _ = found[0]
        varied = _varied(fqn)
        if "*" not in pattern:
            if len(found) > 1:
                raise PlanError(
                    f"{_described(self.converter)}: several tensors are {pattern!r} of {self.target!r}"
                )
            return varied
        match = re.search(pattern.replace("*.", r"(?P<star>[0-9]+)\."), key)
        if match is None or _NUMBER.findall(key) != _NUMBER.findall(fqn):
            raise PlanError(f"{_described(self.converter)}: which number of {fqn!r} is counted is not known")
        place = sum(each.start() < match.start("star") for each in _NUMBER.finditer(key))
        return varied.replace(f"{{n{place}}}", "{item}")

    def _target_name(self, key: str) -> str:
        """Return the name of a target as transformers puts it into the whole one."""
        first = self.converter.target_patterns[0]
        if "*" in key:
            raise PlanError(f"{_described(self.converter)}: it makes a list of tensors")
        before, found, behind = self.target.partition(first)
        if not found:
            raise PlanError(f"{_described(self.converter)}: {first!r} is not in {self.target!r}")
        return before + key + behind

    def _varied_target(self, name: str, like: str) -> str:
        """Vary the numbers of a target, which are those of ``like`` in their order, without the counted
        one."""
        own, known = _NUMBER.findall(name), _NUMBER.findall(like)
        if own != known[: len(own)]:
            raise PlanError(f"{like!r} becomes {name!r}, whose numbers are others")
        return _varied(name)


@dataclass
class _DeclaredTensor:
    """Dimensions as texts of axes, and sizes where they are known; ``is_list``: one for each item."""

    dims: _Dims
    shape: tuple[int | None, ...]
    is_list: bool = False


@dataclass
class _Work:
    """The tensors between operations, by the patterns that transformers has for them."""

    converter: Any
    tensors: dict[str, _DeclaredTensor]
    texts: dict[str, str]
    sizes: dict[str, Any]

    def apply(self, operation: Any) -> None:
        """Apply an operation of transformers. PlanError for one that cannot be said."""
        kind = type(operation).__name__
        act: Callable[[Any], None] | None = _ACTS.get(kind)
        if act is None:
            raise PlanError(f"{_described(self.converter)}: {kind}")
        act(self, operation)  # type: ignore[call-arg]

    def text(self, dims: Iterable[str]) -> str:
        """Return the dimensions with the axes that they are made of at last."""
        return " ".join(_AXIS.sub(lambda axis: self._resolved(axis[0]), each) for each in dims)

    def _resolved(self, axis: str) -> str:
        text = self.texts.get(axis)
        return axis if text is None else _AXIS.sub(lambda inner: self._resolved(inner[0]), text)

    def _single(self) -> tuple[str, _DeclaredTensor]:
        if len(self.tensors) != 1:
            raise PlanError(f"{_described(self.converter)}: several tensors where one should be")
        return next(iter(self.tensors.items()))

    def merge(self, operation: Any) -> None:
        """`MergeModulelist`: stacked along a new dimension."""
        made = {}
        for pattern, tensor in self.tensors.items():
            if not tensor.is_list:
                raise PlanError(f"{_described(self.converter)}: {pattern!r} is no list")
            dims, shape = list(tensor.dims), list(tensor.shape)
            dims.insert(operation.dim, "item")
            shape.insert(operation.dim, None)
            made[pattern] = _DeclaredTensor(dims, tuple(shape))
        if len(made) == 1 and len(self.converter.target_patterns) == 1:
            (tensor,) = made.values()
            made = {self.converter.target_patterns[0]: tensor}
        self.tensors = made

    def concatenate(self, operation: Any) -> None:
        """`Concatenate`: one behind the other; the other dimensions have the same axes."""
        parts = list(self.tensors.values())
        if any(part.is_list or len(part.dims) != len(parts[0].dims) for part in parts):
            raise PlanError(
                f"{_described(self.converter)}: Concatenate of a list, or of different dimensions"
            )
        dim = operation.dim % len(parts[0].dims)
        for part in parts[1:]:
            for at, text in enumerate(part.dims):
                if at != dim and text != parts[0].dims[at]:
                    self._make(text, parts[0].dims[at])
        dims = list(parts[0].dims)
        dims[dim] = f"({' + '.join(part.dims[dim] for part in parts)})"
        for part, size in ((part, part.shape[dim]) for part in parts):
            if size is not None and _AXIS.fullmatch(part.dims[dim]):
                self.sizes[part.dims[dim]] = size
        shape = tuple(None if at == dim else size for at, size in enumerate(parts[0].shape))
        self.tensors = {self.converter.target_patterns[0]: _DeclaredTensor(dims, shape)}

    def chunk(self, operation: Any) -> None:
        """`Chunk`: equal parts for the targets."""
        _, tensor = self._single()
        targets, dim = self.converter.target_patterns, operation.dim % len(tensor.dims)
        size = tensor.shape[dim]
        if operation.num_shards_attribute is not None or size is None or size % len(targets):
            raise PlanError(
                f"{_described(self.converter)}: Chunk into parts that are not known, or not equal"
            )
        axis = tensor.dims[dim]
        names = [f"{axis}_{number}" for number in range(len(targets))]
        self._make(axis, f"({' + '.join(names)})")
        self.sizes |= dict.fromkeys(names, size // len(targets))
        self.tensors = {}
        for target, part in zip(targets, names, strict=True):
            dims, shape = list(tensor.dims), list(tensor.shape)
            dims[dim], shape[dim] = part, size // len(targets)
            self.tensors[target] = _DeclaredTensor(dims, tuple(shape))

    def transpose(self, operation: Any) -> None:
        """`Transpose`: two dimensions change places."""
        pattern, tensor = self._single()
        if operation.check_dims or tensor.is_list:
            raise PlanError(
                f"{_described(self.converter)}: Transpose that depends on the model, or of a list"
            )
        dims, shape = list(tensor.dims), list(tensor.shape)
        for column in (dims, shape):
            a, b = operation.dim0, operation.dim1
            column[a], column[b] = column[b], column[a]
        self._replace(pattern, _DeclaredTensor(dims, tuple(shape)))

    def interleave(self, operation: Any) -> None:
        """`Interleave`: halves and pairs change places."""
        pattern, tensor = self._single()
        dim = operation.dim % len(tensor.dims)
        self._swap(tensor, dim, "", ("two", "half") if operation.inverse else ("half", "two"))
        self._replace(pattern, tensor)

    def permute(self, operation: Any) -> None:
        """`PermuteForRope`: the same within each head."""
        if operation.subconfig_key is not None:
            raise PlanError(
                f"{_described(self.converter)}: PermuteForRope with the heads of a part of the model"
            )
        wanted = operation.permute_layer_names
        for pattern, tensor in list(self.tensors.items()):
            if wanted is None or any(name in pattern for name in wanted):
                self._swap(tensor, 0, "heads", ("two", "half") if operation.inverse else ("half", "two"))
                self.sizes["heads"] = "num_attention_heads"
                if len(self.converter.source_patterns) == len(self.converter.target_patterns) == 1:
                    self._replace(pattern, tensor)

    def _swap(self, tensor: _DeclaredTensor, dim: int, outer: str, inner: tuple[str, str]) -> None:
        axis = tensor.dims[dim]
        own = [f"{axis}_{name}" if name == "half" else name for name in inner]
        self._make(axis, f"({' '.join(filter(None, (outer, *own)))})")
        tensor.dims[dim] = f"({' '.join(filter(None, (outer, *reversed(own))))})"
        self.sizes["two"] = 2

    def _make(self, axis: str, text: str) -> None:
        """Let an axis of a source be made of several, or be another one."""
        if not _AXIS.fullmatch(axis) or axis in self.texts or axis == "item":
            raise PlanError(f"{_described(self.converter)}: the same dimension is divided twice")
        self.texts[axis] = text

    def _replace(self, pattern: str, tensor: _DeclaredTensor) -> None:
        """Put a result in the place of its tensor; that of the only operation is the target."""
        targets = self.converter.target_patterns
        del self.tensors[pattern]
        self.tensors[targets[0] if len(targets) == 1 else pattern] = tensor


_AXIS: Final = re.compile(r"[A-Za-z_]\w*")
_ACTS: Final[Mapping[str, Any]] = {
    "MergeModulelist": _Work.merge,
    "Concatenate": _Work.concatenate,
    "Chunk": _Work.chunk,
    "Transpose": _Work.transpose,
    "Interleave": _Work.interleave,
    "PermuteForRope": _Work.permute,
}


def _described(converter: Any) -> str:
    return f"{', '.join(converter.source_patterns)} -> {', '.join(converter.target_patterns)}"
