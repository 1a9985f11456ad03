"""Weight maps from the conversions of transformers 5 (`WeightRenaming`, `WeightConverter`).

Conversions are regular expressions on parts of names, with operations on tensors. Names and shapes of a
checkpoint select the tensors. transformers itself performs the renaming.
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
from dcp.storage.near_names import listed
from dcp.storage.stores.opening import OpenWith


@plain_errors
def transformers_map(
    source: str | os.PathLike[str],
    conversions: Sequence[Any] | Any = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> WeightMap:
    """Make a weight map from a checkpoint's tensors to the model that transformers builds from the
    checkpoint.

    The map holds transformers' own rules for these names, such as stacked experts, fused queries and keys,
    and permutations. Tensor data is not read.

    Args:
        source: Path or URL of a checkpoint of any format. A transformers folder contains the model's
            ``config.json``.
        conversions: A transformers model, or `WeightRenaming` and `WeightConverter` objects. Default: the
            conversions of the architecture or model type in ``config.json``.
        storage_options: Options of the URL's file system.

    Returns:
        A `WeightMap` for `dcp.load`, `dcp.save` (its ``inverse``) and `dcp.convert`.

    Raises:
        OptionError: transformers is not installed, or has no conversions for the model.
        PlanError: The map language cannot express some operations; the message names them.
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
        raise OptionError(
            "transformers_map needs transformers 5 or newer: pip install 'transformers>=5'"
        ) from error
    return conversion_mapping


def _of_config(config: Mapping[str, Any]) -> Sequence[Any]:
    mapping = _conversion_mapping()
    names = [*(config.get("architectures") or ()), config.get("model_type")]
    for name in names:
        found = mapping.get_checkpoint_conversion_mapping(name) if isinstance(name, str) else None
        if found is not None:
            return [*found, *mapping.get_checkpoint_conversion_mapping("legacy")]
    shown = " or ".join(repr(name) for name in names if name) or "a model without config.json"
    raise OptionError(
        f"transformers has no conversions for {shown}: its model and checkpoints have the same tensors"
    )


# -- conversions as rules ------------------------------------------------------------------------------------


_NUMBER: Final = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
_AXIS: Final = re.compile(r"[A-Za-z_]\w*")
_MAX_LISTED: Final = 5


def map_of_conversions(conversions: Sequence[Any], tensors: Mapping[str, tuple[int, ...]]) -> WeightMap:
    """Make a map of ``conversions`` for a checkpoint of ``tensors`` (shapes by name).

    PlanError names unsupported operations.
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
        shown = listed(list(dict.fromkeys(problems)), most=_MAX_LISTED, show=str)
        raise PlanError(f"a weight map cannot express these conversions of transformers: {shown}")
    return WeightMap.from_data({"name": "transformers", "rules": list(rules.values())})


def _varied(fqn: str, like: str | None = None) -> str:
    """Replace the numbers of a name by variable parts; ``like`` has the same numbers."""
    if "{" in fqn or "}" in fqn:
        raise PlanError(f"{fqn!r} contains braces, which names in a weight map cannot contain")
    if like is not None and _NUMBER.findall(fqn) != _NUMBER.findall(like):
        if _NUMBER.search(like):
            raise PlanError(f"{like!r} becomes {fqn!r}, with different numbers in the name")
        return fqn
    numbers = iter(range(len(fqn)))
    return _NUMBER.sub(lambda _: f"{{n{next(numbers)}}}", fqn)


@dataclass
class _DeclaredTensor:
    """Dimensions as texts of axes, with known sizes; ``is_list``: one tensor for each item."""

    dims: list[str]
    shape: tuple[int | None, ...]
    is_list: bool = False


@dataclass
class _Group:
    """Tensors that one converter makes into one or several targets, by source pattern.

    Members are (name, name when the converter runs, shape). ``tensors`` are intermediate results by
    transformers' pattern; ``texts`` define axes made of several axes.
    """

    converter: Any
    target: str
    members: dict[str, list[tuple[str, str, tuple[int, ...]]]] = field(default_factory=dict)
    tensors: dict[str, _DeclaredTensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of tensors in a list."""
        return max((len(found) for pattern, found in self.members.items() if "*" in pattern), default=0)

    def rule(self, *, is_counted: bool) -> dict[str, Any]:
        """Return the rule of a map for this group, with the list length if all groups agree. PlanError for
        unsupported operations."""
        if is_counted and self.count:
            self.sizes["item"] = self.count
        patterns = [pattern for pattern in self.converter.source_patterns if pattern in self.members]
        own: dict[str, list[str]] = {}
        for number, pattern in enumerate(patterns):
            found = self.members[pattern]
            dims = [f"s{number}_{dim}" for dim in range(len(found[0][2]))]
            own[self._name(pattern, found)] = dims
            self.tensors[pattern] = _DeclaredTensor(list(dims), found[0][2], is_list="*" in pattern)
        for operation in self.converter.operations:
            act = _ACTS.get(kind := type(operation).__name__)
            if act is None:
                raise self._refused(kind)
            act(self, operation)
        if any(tensor.is_list for tensor in self.tensors.values()):
            raise self._refused("the result is a list of tensors")
        like = next(iter(self.members.values()))[0][0]
        made = ((self._target_name(key, like), tensor) for key, tensor in self.tensors.items())
        return {
            "from": {name: self._text(dims) for name, dims in own.items()},
            "to": {name: self._text(tensor.dims) for name, tensor in made},
            "sizes": self.sizes,
        }

    def _refused(self, what: str) -> PlanError:
        patterns = self.converter.source_patterns, self.converter.target_patterns
        return PlanError(f"{' -> '.join(map(', '.join, patterns))}: {what}")

    def _name(self, pattern: str, found: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
        fqn, key, _ = found[0]
        varied = _varied(fqn)
        if "*" not in pattern:
            if len(found) > 1:
                raise self._refused(f"several tensors match {pattern!r} of {self.target!r}")
            return varied
        match = re.search(pattern.replace("*.", r"(?P<star>[0-9]+)\."), key)
        if match is None or _NUMBER.findall(key) != _NUMBER.findall(fqn):
            raise self._refused(f"cannot tell which number in {fqn!r} is the index of the list")
        place = sum(each.start() < match.start("star") for each in _NUMBER.finditer(key))
        return varied.replace(f"{{n{place}}}", "{item}")

    def _target_name(self, key: str, like: str) -> str:
        """Return the target name that transformers makes, with the numbers of ``like`` as variable parts."""
        first = self.converter.target_patterns[0]
        if "*" in key:
            raise self._refused("an operation returns a list of tensors")
        before, found, behind = self.target.partition(first)
        if not found:
            raise self._refused(f"{first!r} is not in {self.target!r}")
        name = before + key + behind
        own, known = _NUMBER.findall(name), _NUMBER.findall(like)
        if own != known[: len(own)]:
            raise PlanError(f"{like!r} becomes {name!r}, with different numbers in the name")
        return _varied(name)

    def _text(self, dims: Iterable[str]) -> str:
        """Return the dimensions with all axes resolved."""
        return " ".join(_AXIS.sub(lambda axis: self._resolved(axis[0]), each) for each in dims)

    def _resolved(self, axis: str) -> str:
        return self._text([self.texts[axis]]) if axis in self.texts else axis

    # -- operations of transformers --------------------------------------------------------------------------

    def merge(self, operation: Any) -> None:
        """`MergeModulelist`: stacked along a new dimension."""
        for pattern, tensor in self.tensors.items():
            if not tensor.is_list:
                raise self._refused(f"{pattern!r} is not a list of tensors")
            shape = list(tensor.shape)
            tensor.dims.insert(operation.dim, "item")
            shape.insert(operation.dim, None)
            tensor.shape, tensor.is_list = tuple(shape), False
        if len(self.tensors) == 1:
            self._replace(*self._single())

    def concatenate(self, operation: Any) -> None:
        """Apply `Concatenate`: join parts along one dimension; other dimensions share axes."""
        first, *others = parts = list(self.tensors.values())
        if any(part.is_list or len(part.dims) != len(first.dims) for part in parts):
            raise self._refused("Concatenate of a list, or along different dimensions")
        dim = operation.dim % len(first.dims)
        for part in others:
            for at, text in enumerate(part.dims):
                if at != dim and text != first.dims[at]:
                    self._make(text, first.dims[at])
        for part in parts:
            size = part.shape[dim]
            if size is not None and _AXIS.fullmatch(part.dims[dim]):
                self.sizes[part.dims[dim]] = size
        dims, shape = list(first.dims), list(first.shape)
        dims[dim], shape[dim] = f"({' + '.join(part.dims[dim] for part in parts)})", None
        self.tensors = {self.converter.target_patterns[0]: _DeclaredTensor(dims, tuple(shape))}

    def chunk(self, operation: Any) -> None:
        """`Chunk`: equal parts for the targets."""
        _, tensor = self._single()
        targets, dim = self.converter.target_patterns, operation.dim % len(tensor.dims)
        size = tensor.shape[dim]
        if operation.num_shards_attribute is not None or size is None or size % len(targets):
            raise self._refused("Chunk into parts of unknown or unequal sizes")
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
            raise self._refused("Transpose that depends on the model, or of a list")
        order = list(range(len(tensor.dims)))
        a, b = operation.dim0, operation.dim1
        order[a], order[b] = order[b], order[a]
        tensor.dims = [tensor.dims[at] for at in order]
        tensor.shape = tuple(tensor.shape[at] for at in order)
        self._replace(pattern, tensor)

    def interleave(self, operation: Any) -> None:
        """`Interleave`: halves and pairs change places."""
        pattern, tensor = self._single()
        self._swap(tensor, operation.dim % len(tensor.dims), "", is_inverse=operation.inverse)
        self._replace(pattern, tensor)

    def permute(self, operation: Any) -> None:
        """`PermuteForRope`: the same within each head."""
        if operation.subconfig_key is not None:
            raise self._refused("PermuteForRope with the number of heads of a submodel")
        wanted = operation.permute_layer_names
        for pattern, tensor in list(self.tensors.items()):
            if wanted is None or any(name in pattern for name in wanted):
                self._swap(tensor, 0, "heads", is_inverse=operation.inverse)
                self.sizes["heads"] = "num_attention_heads"
                if len(self.converter.source_patterns) == 1:
                    self._replace(pattern, tensor)

    def _swap(self, tensor: _DeclaredTensor, dim: int, outer: str, *, is_inverse: bool) -> None:
        axis, inner = tensor.dims[dim], ["two", f"{tensor.dims[dim]}_half"]
        if not is_inverse:
            inner.reverse()
        self._make(axis, f"({' '.join(filter(None, (outer, *inner)))})")
        tensor.dims[dim] = f"({' '.join(filter(None, (outer, *reversed(inner))))})"
        self.sizes["two"] = 2

    def _single(self) -> tuple[str, _DeclaredTensor]:
        if len(self.tensors) != 1:
            raise self._refused("several tensors where one is expected")
        return next(iter(self.tensors.items()))

    def _make(self, axis: str, text: str) -> None:
        """Define a source axis by a text of axes."""
        if not _AXIS.fullmatch(axis) or axis in self.texts or axis == "item":
            raise self._refused("the same dimension is divided twice")
        self.texts[axis] = text

    def _replace(self, pattern: str, tensor: _DeclaredTensor) -> None:
        """Store the result of an operation; the result of the only operation is the target."""
        targets = self.converter.target_patterns
        del self.tensors[pattern]
        self.tensors[targets[0] if len(targets) == 1 else pattern] = tensor


_ACTS: Final[Mapping[str, Callable[[_Group, Any], None]]] = {
    "MergeModulelist": _Group.merge,
    "Concatenate": _Group.concatenate,
    "Chunk": _Group.chunk,
    "Transpose": _Group.transpose,
    "Interleave": _Group.interleave,
    "PermuteForRope": _Group.permute,
}
