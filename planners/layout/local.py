"""Local layout: the tensors of a rank as columns of boxes in local memory.

Shared by saves and loads. Of many thousands of tensors most differ only in name and memory; boxes are
computed once per form, and each tensor is asked only for facts known to torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.layout.local_tensor import (
    OBJECT,
    PLAIN,
    LocalTensor,
    SpecCache,
    local_tensor,
    plain_tensor,
    tensor_kind,
)
from dcp.planners.rank_state import RankState
from dcp.storage.engine.memory import is_read_only
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import itemsizes
from dcp.storage.geometry.strides import Int64, gather_rows, starts
from dcp.storage.tensors import LocalMemory

DTYPE_CODES: Mapping[torch.dtype, int] = {
    getattr(torch, name): dtype.code for name, dtype in dtypes.BY_NAME.items() if hasattr(torch, name)
}
"""Code of `dcp.storage.formats.dtypes` by torch dtype."""


_nbytes, _is_resizable = torch.UntypedStorage.nbytes, torch.UntypedStorage.resizable
_dtype, _is_cpu = map(attrgetter, ("dtype", "is_cpu"))
_COMPLEX = np.array([dtype.code for name, dtype in dtypes.BY_NAME.items() if name.startswith("complex")])
_MAX_LISTED = 20


class _SourceFacts(NamedTuple):
    """Facts of local tensors from torch. `of` raises RuntimeError for tensors without memory.

    ``is_cut``: the storage was resized below the tensor. ``is_nowhere``: elements without memory.
    ``is_foreign``: memory of another library, such as numpy.
    """

    codes: npt.NDArray[np.uint8]
    pointers: Int64
    is_contiguous: npt.NDArray[np.bool_]
    is_lazy: npt.NDArray[np.bool_]
    is_cpu: npt.NDArray[np.bool_]
    is_cut: npt.NDArray[np.bool_]
    is_nowhere: npt.NDArray[np.bool_]
    is_foreign: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, sources: Sequence[torch.Tensor]) -> _SourceFacts:
        count, tensor = len(sources), torch.Tensor
        codes = np.fromiter(map(DTYPE_CODES.get, map(_dtype, sources), repeat(0)), np.uint8, count)
        is_lazy = np.fromiter(map(tensor.is_neg, sources), np.bool_, count)
        for number in np.flatnonzero(np.isin(codes, _COMPLEX)).tolist():
            is_lazy[number] |= sources[number].is_conj()
        pointers = np.fromiter(map(tensor.data_ptr, sources), np.int64, count)
        is_contiguous = np.fromiter(map(tensor.is_contiguous, sources), np.bool_, count)
        is_cpu = np.fromiter(map(_is_cpu, sources), np.bool_, count)
        items = np.fromiter(map(tensor.numel, sources), np.int64, count)
        for number in np.flatnonzero(~is_contiguous & (items > 0)).tolist():  # to the last item in memory
            extents = zip(sources[number].shape, sources[number].stride(), strict=True)
            items[number] = 1 + sum((size - 1) * stride for size, stride in extents)
        ends = items + np.fromiter(map(tensor.storage_offset, sources), np.int64, count)
        storages = list(map(tensor.untyped_storage, sources))
        there = np.fromiter(map(_nbytes, storages), np.int64, count)
        is_cut = (ends * itemsizes(codes) > there) & (items > 0)
        is_foreign = ~np.fromiter(map(_is_resizable, storages), np.bool_, count)
        is_nowhere = (pointers == 0) & (items > 0)
        return cls(codes, pointers, is_contiguous, is_lazy, is_cpu, is_cut, is_nowhere, is_foreign)


class _Kind(NamedTuple):
    """Common part of tensors that differ only in name, dtype and memory.

    ``counts`` are of dimensions, boxes, local tensors, and two flags: sharded, replicated. ``box_sources``
    is the local tensor of each box. Integers for one kind, or columns for all tensors.
    """

    counts: Any
    shape: Any
    offsets: Any
    sizes: Any
    local_offsets: Any
    box_sources: Any
    source_ndims: Any
    source_shapes: Any


@dataclass(eq=False)
class _Builder:
    """Builder of columns from tensors; ``problems`` begin with the row.

    ``forms`` are numbers in ``kinds`` by row, ``known`` those of shared layouts.
    """

    loading: bool
    fqns: list[str] = field(default_factory=list)
    forms: list[int] = field(default_factory=list)
    kinds: list[_Kind] = field(default_factory=list)
    known: dict[Any, tuple[Any, int]] = field(default_factory=dict)
    requires_grad: list[bool] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    sourceless: dict[int, int] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def add(self, fqn: str, local: LocalTensor) -> None:
        """Add a tensor with any number of boxes and local tensors."""
        if not local.boxes:
            code = self.sourceless[len(self.fqns)] = DTYPE_CODES.get(local.dtype, 0)
            if not code:
                self.note(f"{fqn!r}: dtype {local.dtype} cannot be stored")
        for source in local.sources:
            if tensor_kind(type(source)) != PLAIN:
                self.note(f"{fqn!r}: the local shard is a {type(source).__name__}, not a plain tensor")
            elif source.dtype != local.dtype:
                self.note(f"{fqn!r}: the local shard is {source.dtype}, but the tensor is {local.dtype}")
        key = id(local.boxes), local.shape
        if key not in self.known:
            self.known[key] = local.boxes, self.form(local)
        self.forms.append(self.known[key][1])
        self.fqns.append(fqn)
        self.sources += local.sources
        self.requires_grad.append(local.requires_grad)

    def form(self, local: LocalTensor) -> int:
        """Add a form, and return its number."""
        sources, boxes = local.sources, local.boxes
        offsets, sizes, inner = zip(*boxes, strict=True) if boxes else ((), (), ())
        shapes = list(map(attrgetter("shape"), sources))
        kind = _Kind(
            (len(local.shape), len(boxes), len(sources), local.sharded, local.replicated),
            local.shape,
            list(chain.from_iterable(offsets)),
            list(chain.from_iterable(sizes)),
            list(chain.from_iterable(inner)),
            range(len(boxes)) if len(sources) > 1 else (0,) * len(boxes),
            list(map(len, shapes)),
            list(chain.from_iterable(shapes)),
        )
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def note(self, problem: str) -> None:
        self.problems.append((len(self.fqns), problem))

    def finish(self) -> RankState:
        """Return the columns; PlanError if any tensor cannot be stored."""
        forms = np.array(self.forms, np.int64)
        by_kind = zip(*self.kinds, strict=True) if self.kinds else repeat((), len(_Kind._fields))
        found = _Kind._make(map(_of_all, by_kind, repeat(forms)))
        ndims, box_counts, sources, sharded, replicated = found.counts.reshape(-1, 5).T
        rows = np.arange(len(forms))
        item_tensors, source_rows = np.repeat(rows, box_counts), np.repeat(rows, sources)
        source_start = starts(sources)
        facts = self._ask_sources(source_rows)
        count, values = len(item_tensors), len(self.objects)
        codes = np.zeros(len(forms), np.uint8)
        codes[source_rows] = facts.codes
        codes[list(self.sourceless)] = list(self.sourceless.values())
        columns = SaveColumns(
            fqns=tuple(self.fqns),
            dtype_codes=codes,
            requires_grad=np.array(self.requires_grad, np.uint8),
            shape_start=starts(ndims),
            shape_values=found.shape,
            item_tensors=item_tensors,
            item_offsets=found.offsets,
            item_sizes=found.sizes,
            item_local_offsets=found.local_offsets,
            item_sources=source_start[item_tensors] + found.box_sources,
            item_sharded=sharded[item_tensors].astype(np.uint8),
            item_digests=np.zeros(count, np.uint64),
            item_ties=np.full(count, -1, np.int64),
            objects=SaveObjects(tuple(self.objects), np.zeros(values, np.uint64), np.zeros(values, np.int64)),
            stride_orders={} if facts.is_contiguous.all() else self._stride_orders(source_rows, facts),
        )
        is_plain = facts.is_contiguous & ~facts.is_lazy & facts.is_cpu
        shapes = starts(found.source_ndims), found.source_shapes
        memory = LocalMemory(self.sources, is_plain, facts.pointers, facts.codes, *shapes)
        others = replicated[item_tensors].astype(np.uint8)
        return RankState(columns, memory, list(self.objects.values()), others)

    def _stride_orders(self, source_rows: Int64, facts: _SourceFacts) -> dict[int, tuple[int, ...]]:
        """Return the order of dimensions in memory, slowest first, of tensors that are dense but not
        C-ordered.
        """
        orders = {}
        for number in np.flatnonzero(~facts.is_contiguous).tolist():
            tensor = self.sources[number]
            order = tuple(np.argsort(np.negative(tensor.stride()), kind="stable").tolist())
            if order != tuple(range(tensor.ndim)) and tensor.permute(order).is_contiguous():
                orders[int(source_rows[number])] = order
        return orders

    # -- sources ---------------------------------------------------------------------------------------------

    def _ask_sources(self, rows: Int64) -> _SourceFacts:
        """Return the facts of all local tensors; PlanError for unsupported ones.

        Lazily conjugated or negated views are saved by value, and loaded by copies that heed the flags.
        """
        facts: _SourceFacts | None = None
        if not self.problems:
            with suppress(RuntimeError):  # torch refuses the address of sparse, fake and functional tensors
                facts = _SourceFacts.of(self.sources)
        if facts is not None and facts.is_lazy.any() and not self.loading:
            for number in np.flatnonzero(facts.is_lazy).tolist():
                self.sources[number] = self.sources[number].detach().resolve_conj().resolve_neg()
            facts = _SourceFacts.of(self.sources)
        if facts is not None and self.loading:
            numbers = np.flatnonzero(facts.is_foreign & facts.is_cpu & (facts.pointers != 0))
            is_fixed = is_read_only(facts.pointers[numbers]) if len(numbers) else np.zeros(0, np.bool_)
            for row in rows[numbers[is_fixed]].tolist():
                text = (
                    f"{self.fqns[row]!r}: the memory is read-only, such as a numpy memory map with mode 'r'; "
                    "load into a clone(), or open the map with mode 'r+' or 'c'"
                )
                self.problems.append((row, text))
        if self.problems or facts is None or (facts.is_cut | facts.is_nowhere | (facts.codes == 0)).any():
            self._raise_problems(rows)
        return facts

    def _raise_problems(self, rows: Int64) -> NoReturn:
        """Raise one error for all unsupported tensors, in the order of the state dict."""
        problems = [*self.problems]
        for row, source in zip(rows.tolist(), self.sources, strict=True):
            if tensor_kind(type(source)) == PLAIN and (fault := _fault(self.fqns[row], source)) is not None:
                problems.append((row, fault))
        texts = [text for _, text in sorted(problems, key=itemgetter(0))]
        shown = texts[:_MAX_LISTED]
        more = f"; and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
        raise PlanError(
            f"tensors that cannot be {'loaded into' if self.loading else 'saved'}: {'; '.join(shown)}{more}",
            problems=shown,
        )


def _of_all(values: Sequence[Sequence[int]], forms: Int64) -> Int64:
    """Return the concatenated ``values`` of all ``forms``."""
    flat = np.fromiter(chain.from_iterable(values), np.int64)
    return gather_rows(flat, starts([*map(len, values)]), forms)


def _fault(fqn: str, tensor: torch.Tensor) -> str | None:
    """Return the reason why a plain local tensor cannot be stored, with advice."""
    try:
        facts = _SourceFacts.of([tensor])
    except RuntimeError as error:
        return _no_memory(fqn, tensor, error)
    if not facts.codes[0]:
        if tensor.is_quantized:
            return (
                f"{fqn!r}: {tensor.dtype} has a scale and a zero point, which a checkpoint cannot hold "
                "(stock torch would load only the integers): store int_repr(), q_scale() and "
                "q_zero_point(), or dequantize it first"
            )
        return f"{fqn!r}: dtype {tensor.dtype} cannot be stored; convert it to a supported dtype first"
    if facts.pointers[0] and facts.is_cut[0]:
        return f"{fqn!r}: its memory was partly freed (resized storage); reshard it first, or clone it before"
    if facts.pointers[0] or not tensor.numel():
        return None
    if tensor.is_meta:
        return f"{fqn!r}: it is on the meta device and has no values; materialize it with to_empty() first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"{fqn!r}: a {type(tensor).__name__} has no memory of its own and no __tensor_flatten__; "
            "dequantize it, or store its parts under their own names"
        )
    return f"{fqn!r}: its memory was freed (resized storage); reshard it first (a fake tensor has none)"


def _no_memory(fqn: str, value: Any, error: RuntimeError) -> str:
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return f"{fqn!r}: layout {value.layout} cannot be stored; use to_dense(), or store its parts"
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"{fqn!r}: nested tensors cannot be stored; store the tensors of unbind()"
    return f"{fqn!r}: a {type(value).__name__} without memory of its own ({str(error).splitlines()[0]})"


def collect_tensors(state_dict: Mapping[str, Any], *, loading: bool = False) -> RankState:
    """Return the columns of a flat state dict on this rank, in order, without digests and ties.

    Local tensors may require grad; copy them under no_grad.

    Raises:
        PlanError: For tensors that cannot be stored (sparse, quantized, meta, freed, unknown dtype), all in
            one error with advice.
    """
    builder, plain, cache = _Builder(loading), dict[tuple[int, ...], int](), SpecCache()
    add_form, add_name = builder.forms.append, builder.fqns.append
    add_source, add_grad = builder.sources.append, builder.requires_grad.append
    for fqn, value in state_dict.items():
        kind = tensor_kind(type(value))
        try:
            if kind == OBJECT:
                builder.objects[fqn] = value
            elif kind == PLAIN and not hasattr(value, "global_shape"):
                form = plain.get(value.shape)
                if form is None:
                    form = plain[value.shape] = builder.form(plain_tensor(value))
                add_form(form)  # the common case, inlined
                add_name(fqn)
                add_source(value)
                add_grad(value.requires_grad)
            elif (local := local_tensor(fqn, value, cache)) is not None:
                builder.add(fqn, local)
        except PlanError as error:
            builder.note(str(error))
        except RuntimeError as error:
            builder.note(_no_memory(fqn, value, error))
    return builder.finish()


def item_ties(columns: SaveColumns, memory: LocalMemory) -> Int64:
    """Return ``SaveColumns.item_ties``: boxes with the same memory, such as tied weights, share one
    record.
    """
    ties = np.full(len(columns.item_tensors), -1, np.int64)
    _, inverse, counts = np.unique(memory.pointers, return_inverse=True, return_counts=True)
    shared = (counts[inverse] > 1) & (memory.pointers != 0)
    if not shared.any():
        return ties
    keys: dict[int, Any] = {}
    for row in np.flatnonzero(shared[columns.item_sources]).tolist():
        source = memory.tensors[columns.item_sources[row]]
        box = slice(int(columns.box_start[row]), int(columns.box_start[row + 1]))
        place = (columns.item_sizes[box].tobytes(), columns.item_local_offsets[box].tobytes())
        keys[row] = (source.data_ptr(), source.device, source.dtype, source.shape, source.stride(), place)
    repeated = {key for key, count in Counter(keys.values()).items() if count > 1}
    numbers: dict[Any, int] = {}
    for row, key in keys.items():
        if key in repeated:
            ties[row] = numbers.setdefault(key, len(numbers))
    return ties
