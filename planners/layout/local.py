"""The tensors of one rank as columns: which boxes of which global tensors lie where in local memory.

Shared by saving and loading. There may be many thousands of tensors, and most differ in name and memory only.
So boxes are found once a form (`_LocalForm`), and each tensor is asked only what torch alone can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, itemgetter, not_
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.layout.checkpointable import any_has_claim, has_claim
from dcp.planners.layout.local_tensor import (
    DTENSOR,
    KINDS,
    OBJECT,
    PLAIN,
    LocalTensor,
    SpecCache,
    TensorLayout,
    layout_of,
    local_tensor,
)
from dcp.planners.layout.placements import LocalBox
from dcp.planners.rank_state import RankState
from dcp.storage.engine.memory import is_read_only
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Int64, itemsizes, starts
from dcp.storage.geometry.ragged import expand_ranges, gather_rows
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_compat import local_part, spec_of

__all__ = ["DTYPE_CODES", "collect_tensors"]

DTYPE_CODES: Mapping[torch.dtype, int] = {
    getattr(torch, name): dtype.code for name, dtype in dtypes.BY_NAME.items() if hasattr(torch, name)
}
"""Stable code of `dcp.storage.formats.dtypes` by torch dtype."""


class _Codes(dict[torch.dtype, int]):
    """Codes by dtype, 0 for those that cannot be stored."""

    def __missing__(self, dtype: torch.dtype) -> int:
        return 0


_CODES = _Codes(DTYPE_CODES)
_nbytes, _is_resizable = torch.UntypedStorage.nbytes, torch.UntypedStorage.resizable
_dtype, _is_cpu, _requires_grad = map(attrgetter, ("dtype", "is_cpu", "requires_grad"))
_COMPLEX = np.array([dtype.code for name, dtype in dtypes.BY_NAME.items() if name.startswith("complex")])
_MAX_LISTED = 20


class _LocalForm(NamedTuple):
    """What tensors have in common that differ in name, dtype and memory only.

    ``source_shapes`` are those of a tensor's plain local tensors, ``box_sources`` says which of these has
    each of its boxes.
    """

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    box_sources: tuple[int, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    sharded: bool
    replicated: bool


class _Forms:
    """Numbers of forms, and their rows in a table."""

    def __init__(self) -> None:
        self.forms: list[_LocalForm] = []
        self._numbers: dict[_LocalForm, int] = {}
        self._by_layout: dict[int, int] = {}

    def number(self, form: _LocalForm) -> int:
        number = self._numbers.setdefault(form, len(self.forms))
        if number == len(self.forms):
            self.forms.append(form)
        return number

    def of_layout(self, layout: TensorLayout, shape: tuple[int, ...]) -> int:
        """The form of DTensors of a layout with one box; a layout is of one shape."""
        number = self._by_layout.get(id(layout))
        if number is None:
            form = _LocalForm(
                tuple(shape), layout.boxes, (0,), (layout.local_shape,), True, layout.replicated
            )
            number = self._by_layout[id(layout)] = self.number(form)
        return number

    def column(self, values: Iterable[Iterable[int]]) -> _Ragged:
        """Values of the forms, each in one row."""
        rows = [tuple(row) for row in values]
        flat = np.fromiter(chain.from_iterable(rows), np.int64)
        return _Ragged(starts([len(row) for row in rows]), flat)


class _PlainForms(dict[tuple[int, ...], int]):
    """Forms of plain tensors by shape."""

    def __init__(self, forms: _Forms) -> None:
        super().__init__()
        self._forms = forms

    def __missing__(self, shape: tuple[int, ...]) -> int:
        zeros, whole = (0,) * len(shape), tuple(shape)
        form = _LocalForm(whole, (LocalBox(zeros, whole, zeros),), (0,), (whole,), False, True)
        number = self[shape] = self._forms.number(form)
        return number


class _Ragged(NamedTuple):
    start: Int64
    values: Int64

    def counts(self, rows: Int64) -> Int64:
        return np.diff(self.start)[rows]

    def take(self, rows: Int64) -> Int64:
        return gather_rows(self.values, self.start, rows)


@dataclass(frozen=True, eq=False)
class _SourceFacts:
    """What torch alone can tell of the sources. `ask` raises RuntimeError for tensors without memory."""

    codes: npt.NDArray[np.uint8]
    pointers: Int64
    is_contiguous: npt.NDArray[np.bool_]
    is_lazy: npt.NDArray[np.bool_]
    is_cpu: npt.NDArray[np.bool_]
    is_cut: npt.NDArray[np.bool_]
    """Whether memory that the tensor has was given back: the storage was resized."""
    is_foreign: npt.NDArray[np.bool_]
    """Whether another library owns the memory, such as numpy."""

    @classmethod
    def ask(cls, sources: Sequence[torch.Tensor]) -> _SourceFacts:
        count, tensor = len(sources), torch.Tensor
        codes = np.fromiter(map(_CODES.__getitem__, map(_dtype, sources)), np.uint8, count)
        is_lazy = np.fromiter(map(tensor.is_neg, sources), np.bool_, count)
        for number in np.flatnonzero(np.isin(codes, _COMPLEX)).tolist():
            is_lazy[number] |= sources[number].is_conj()
        pointers = np.fromiter(map(tensor.data_ptr, sources), np.int64, count)
        is_contiguous = np.fromiter(map(tensor.is_contiguous, sources), np.bool_, count)
        is_cpu = np.fromiter(map(_is_cpu, sources), np.bool_, count)
        items = np.fromiter(map(tensor.numel, sources), np.int64, count)
        for number in np.flatnonzero(~is_contiguous).tolist():
            items[number] = _extent(sources[number])
        ends = items + np.fromiter(map(tensor.storage_offset, sources), np.int64, count)
        storages = list(map(tensor.untyped_storage, sources))
        there = np.fromiter(map(_nbytes, storages), np.int64, count)
        is_cut = (ends * itemsizes(codes) > there) & (items > 0)
        is_foreign = ~np.fromiter(map(_is_resizable, storages), np.bool_, count)
        return cls(codes, pointers, is_contiguous, is_lazy, is_cpu, is_cut, is_foreign)


@dataclass(eq=False)
class _Builder:
    """Takes tensors one by one; ``rows`` says whose the sources are, ``problems`` begin with where they were
    met."""

    loading: bool
    forms: _Forms = field(default_factory=_Forms)
    fqns: list[str] = field(default_factory=list)
    form_numbers: list[int] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    sourceless: dict[int, int] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def add_all(self, state_dict: Mapping[str, Any]) -> None:
        kinds = set(map(KINDS.__getitem__, set(map(type, state_dict.values()))))
        if kinds <= {PLAIN, OBJECT} and self.add_plain(state_dict, has_objects=OBJECT in kinds):
            return
        plain_forms, cache = _PlainForms(self.forms), SpecCache()
        for fqn, value in state_dict.items():
            kind = KINDS[type(value)]
            try:
                if kind == PLAIN and not has_claim(value):
                    self.form_numbers.append(plain_forms[value.shape])
                    self.fqns.append(fqn)
                    self.sources.append(value)
                    self.requires_grad.append(not self.loading and value.requires_grad)
                elif kind == OBJECT:
                    self.objects[fqn] = value
                elif kind != DTENSOR or not self.add_dtensor(fqn, value, cache):
                    self.add(fqn, local_tensor(fqn, value, cache))
            except PlanError as error:
                self.note(str(error))
            except RuntimeError as error:
                self.note(_no_memory(fqn, value, error))

    def add_plain(self, state_dict: Mapping[str, Any], *, has_objects: bool) -> bool:
        """Plain tensors and objects, all together; False, and nothing is added, where a tensor has no shape
        or holds boxes of another."""
        tensors, objects = state_dict, dict[str, Any]()
        if has_objects:
            types = list(map(type, state_dict.values()))
            plain_types = {cls for cls in set(types) if KINDS[cls] == PLAIN}
            is_plain = list(map(plain_types.__contains__, types))
            tensors = dict(compress(state_dict.items(), is_plain))
            objects = dict(compress(state_dict.items(), map(not_, is_plain)) if tensors else state_dict)
        sources, plain_forms = list(tensors.values()), _PlainForms(self.forms)
        if any_has_claim(sources):
            return False
        try:
            self.form_numbers += [plain_forms[source.shape] for source in sources]
        except RuntimeError:
            return False
        self.fqns += tensors
        self.sources += sources
        self.requires_grad += [False] * len(sources) if self.loading else map(_requires_grad, sources)
        self.objects.update(objects)
        return True

    def add_dtensor(self, fqn: str, tensor: DTensor, cache: SpecCache) -> bool:
        """The usual DTensor, one box of a plain local tensor; whether it is one."""
        source = local_part(tensor)
        if KINDS[type(source)] != PLAIN:
            return False
        layout = layout_of(fqn, spec_of(tensor), tensor.shape, cache)
        if layout is None or len(layout.boxes) != 1 or source.shape != layout.local_shape:
            return False
        self.form_numbers.append(self.forms.of_layout(layout, tensor.shape))
        self.fqns.append(fqn)
        self.sources.append(source)
        self.requires_grad.append(not self.loading and tensor.requires_grad)
        return True

    def add(self, fqn: str, local: LocalTensor | None) -> None:
        if local is None:
            return
        code = DTYPE_CODES.get(local.dtype, 0)
        if not local.pieces:
            self.sourceless[len(self.fqns)] = code
            if not code:
                self.note(f"{fqn!r}: dtype {local.dtype} cannot be stored")
        sources: list[torch.Tensor] = []
        box_sources = []
        for source, _ in local.pieces:
            if not sources or source is not sources[-1]:
                self.check_source(fqn, source, local.dtype)
                sources.append(source)
            box_sources.append(len(sources) - 1)
        form = _LocalForm(
            tuple(local.shape),
            tuple(box for _, box in local.pieces),
            tuple(box_sources),
            tuple(tuple(source.shape) for source in sources),
            local.sharded,
            local.replicated,
        )
        self.form_numbers.append(self.forms.number(form))
        self.fqns.append(fqn)
        self.sources.extend(sources)
        self.requires_grad.append(not self.loading and local.requires_grad)

    def check_source(self, fqn: str, source: torch.Tensor, dtype: torch.dtype) -> None:
        if KINDS[type(source)] != PLAIN:
            self.note(f"{fqn!r}: its local part is a {type(source).__name__}, not a plain tensor")
        elif source.dtype != dtype:
            self.note(f"{fqn!r}: its local part is {source.dtype}, the tensor {dtype}")

    def note(self, problem: str) -> None:
        self.problems.append((len(self.fqns), problem))

    def finish(self) -> RankState:
        """The columns; PlanError if anything cannot be stored."""
        forms, numbers = self.forms.forms, np.array(self.form_numbers, np.int64)
        source_counts = np.array([len(form.source_shapes) for form in forms], np.int64)[numbers]
        source_rows = np.repeat(np.arange(len(numbers), dtype=np.int64), source_counts)
        facts = self._ask_sources(source_rows)
        shapes = self.forms.column(form.shape for form in forms)
        source_ndims = self.forms.column([len(shape) for shape in form.source_shapes] for form in forms)
        source_shapes = self.forms.column(chain.from_iterable(form.source_shapes) for form in forms)
        items, replicated = self._items(numbers, starts(source_counts))
        count, values = len(replicated), len(self.objects)
        columns = SaveColumns(
            fqns=tuple(self.fqns),
            dtype_codes=self._row_codes(source_counts, facts),
            requires_grad=np.array(self.requires_grad, np.uint8),
            shape_start=starts(shapes.counts(numbers)),
            shape_values=shapes.take(numbers),
            **items,
            item_digests=np.zeros(count, np.uint64),
            item_ties=np.full(count, -1, np.int64),
            objects=SaveObjects(tuple(self.objects), np.zeros(values, np.uint64), np.zeros(values, np.int64)),
            stride_orders=self._stride_orders(source_rows, facts),
        )
        memory = LocalMemory(
            self.sources,
            facts.is_contiguous & ~facts.is_lazy & facts.is_cpu,
            facts.pointers,
            facts.codes,
            starts(source_ndims.take(numbers)),
            source_shapes.take(numbers),
        )
        return RankState(columns, memory, list(self.objects.values()), replicated)

    def _items(self, numbers: Int64, source_start: Int64) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        """The columns of the boxes, which follow from the forms, and which of them others may hold."""
        forms = self.forms.forms
        box_sources = self.forms.column(form.box_sources for form in forms)
        counts = box_sources.counts(numbers)
        item_tensors = np.repeat(np.arange(len(numbers), dtype=np.int64), counts)
        boxes = [
            self.forms.column(chain.from_iterable(box[part] for box in form.boxes) for form in forms)
            for part in range(3)
        ]
        values = expand_ranges(boxes[0].start[numbers], boxes[0].counts(numbers))
        sharded, replicated = (
            np.array([form[part] for form in forms], np.uint8)[numbers[item_tensors]] for part in (4, 5)
        )
        items = {
            "item_tensors": item_tensors,
            "item_offsets": boxes[0].values[values],
            "item_sizes": boxes[1].values[values],
            "item_local_offsets": boxes[2].values[values],
            "item_sources": source_start[item_tensors] + box_sources.take(numbers),
            "item_sharded": sharded,
        }
        return items, replicated

    def _row_codes(self, source_counts: Int64, facts: _SourceFacts) -> npt.NDArray[np.uint8]:
        """All sources of a tensor have its dtype."""
        codes = np.zeros(len(source_counts), np.uint8)
        filled = source_counts > 0
        codes[filled] = facts.codes[starts(source_counts)[:-1][filled]]
        for row, code in self.sourceless.items():
            codes[row] = code
        return codes

    def _stride_orders(self, source_rows: Int64, facts: _SourceFacts) -> dict[int, tuple[int, ...]]:
        """By tensor the order of dimensions in memory, where that is dense but not C-ordered."""
        orders = {}
        for number in np.flatnonzero(~facts.is_contiguous).tolist():
            order = _dense_order(self.sources[number])
            if order is not None:
                orders[int(source_rows[number])] = order
        return orders

    # -- sources ---------------------------------------------------------------------------------------------

    def _ask_sources(self, rows: Int64) -> _SourceFacts:
        """The facts of all sources; PlanError for those that cannot be stored.

        Lazily conjugated or negated views are saved by value. They are loaded into as they are, since copies
        heed that.
        """
        facts: _SourceFacts | None = None
        if not self.problems:
            try:
                facts = _SourceFacts.ask(self.sources)
            except RuntimeError:
                facts = None  # torch refuses the address of sparse, fake and functional tensors: see below
        if facts is not None and facts.is_lazy.any() and not self.loading:
            for number in np.flatnonzero(facts.is_lazy).tolist():
                self.sources[number] = self.sources[number].detach().resolve_conj().resolve_neg()
            facts = _SourceFacts.ask(self.sources)
        if facts is not None and self.loading:
            self._note_read_only(facts, rows)
        is_bad = bool(self.problems) or facts is None or facts.is_cut.any() or not facts.codes.all()
        if facts is None or is_bad or not self._have_memory(facts.pointers):
            self._raise_problems(rows)
        return facts

    def _note_read_only(self, facts: _SourceFacts, rows: Int64) -> None:
        numbers = np.flatnonzero(facts.is_foreign & facts.is_cpu & (facts.pointers != 0))
        is_fixed = is_read_only(facts.pointers[numbers]) if len(numbers) else np.zeros(0, np.bool_)
        for number in numbers[is_fixed].tolist():
            row = int(rows[number])
            self.problems.append(
                (
                    row,
                    f"{self.fqns[row]!r}: its memory is read-only, as that of a numpy memory map of mode 'r' "
                    "is; load into a clone(), or open the map with mode 'r+' or 'c'",
                )
            )

    def _have_memory(self, pointers: Int64) -> bool:
        return not any(self.sources[number].numel() for number in np.flatnonzero(pointers == 0).tolist())

    def _raise_problems(self, rows: Int64) -> NoReturn:
        """One error for all tensors that cannot be stored, in the order of the state dict."""
        problems = [*self.problems]
        for row, source in zip(rows.tolist(), self.sources, strict=True):
            if KINDS[type(source)] == PLAIN and (fault := _fault(self.fqns[row], source)) is not None:
                problems.append((row, fault))
        told = [text for _, text in sorted(problems, key=itemgetter(0))]
        shown = told[:_MAX_LISTED]
        more = f"; and {len(told) - len(shown)} more" if len(told) > len(shown) else ""
        raise PlanError(
            f"tensors that cannot be {'loaded into' if self.loading else 'saved'}: {'; '.join(shown)}{more}",
            problems=shown,
        )


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from slowest to fastest of a tensor that is dense, but not C-ordered."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    is_other = order != tuple(range(tensor.ndim))
    return order if is_other and tensor.permute(order).is_contiguous() else None


def _extent(tensor: torch.Tensor) -> int:
    """Items of memory from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fault(fqn: str, tensor: torch.Tensor) -> str | None:
    """Why a plain local tensor cannot be stored, and what to do about it."""
    try:
        facts = _SourceFacts.ask([tensor])
    except RuntimeError as error:
        return _no_memory(fqn, tensor, error)
    if not facts.codes[0]:
        if tensor.is_quantized:
            return (
                f"{fqn!r}: {tensor.dtype} has a scale and a zero point, which a checkpoint has no place for "
                "(stock torch loads the integers alone, as other values): store int_repr(), q_scale() and "
                "q_zero_point(), or dequantize it first"
            )
        return f"{fqn!r}: dtype {tensor.dtype} cannot be stored; convert it to a supported dtype first"
    if facts.pointers[0] and facts.is_cut[0]:
        return f"{fqn!r}: its memory was freed in part (resized storage); reshard first, or clone it before"
    if facts.pointers[0] or not tensor.numel():
        return None
    if tensor.is_meta:
        return f"{fqn!r}: on the meta device, there are no values; materialise it with to_empty() first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"{fqn!r}: a {type(tensor).__name__} has no memory of its own and no __tensor_flatten__ with "
            "its parts; dequantise it, or store its parts under names of their own"
        )
    return f"{fqn!r}: its memory was freed (resized storage) or never was (a fake tensor); reshard first"


def _no_memory(fqn: str, value: Any, error: RuntimeError) -> str:
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return f"{fqn!r}: layout {value.layout} cannot be stored; call to_dense(), or store its parts"
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"{fqn!r}: nested tensors cannot be stored; store the parts that unbind() gives"
    return f"{fqn!r}: a {type(value).__name__} without memory of its own ({str(error).splitlines()[0]})"


def collect_tensors(state_dict: Mapping[str, Any], *, purpose: Literal["save", "load"] = "save") -> RankState:
    """What this rank has of a flat state dict, in its order, without digests and ties.

    The local tensors may require grad, so copy them under no_grad. ``requires_grad`` is asked for saves only,
    and 0 else.

    Raises PlanError naming every tensor that cannot be stored (sparse, quantized, meta, freed, unknown dtype)
    and what to do about it.
    """
    builder = _Builder(loading=purpose == "load")
    builder.add_all(state_dict)
    return builder.finish()
