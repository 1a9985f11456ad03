"""The tensors of one rank as columns: which boxes of which global tensors lie where in local memory.

Shared by saving and loading. There may be many thousands of tensors, and most differ in name and memory only.
So boxes are found once a form (`_Form`), and each tensor is asked only what torch alone knows.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from dcp.planners.layout.local_tensor import (
    DTENSOR,
    KINDS,
    OBJECT,
    PLAIN,
    LocalBox,
    LocalTensor,
    SpecCache,
    layout_of,
    local_tensor,
)
from dcp.planners.rank_state import RankState, SaveColumns, SaveObjects
from dcp.storage.engine.memory import is_read_only
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Int64, itemsizes, starts
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_compat import local_part, spec_of

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
_dtype, _is_cpu = map(attrgetter, ("dtype", "is_cpu"))
_COMPLEX = np.array([dtype.code for name, dtype in dtypes.BY_NAME.items() if name.startswith("complex")])
_MAX_LISTED = 20


class _Form(NamedTuple):
    """Rows that tensors have in common which differ in name, dtype and memory only, as packed int64.

    ``counts`` are dimensions, boxes, local tensors, and two flags: sharded, replicated. ``box_sources`` says
    which of the local tensors has each box; ``source_ndims`` and ``source_shapes`` are of these.
    """

    counts: bytes
    shape: bytes
    offsets: bytes
    sizes: bytes
    local_offsets: bytes
    box_sources: bytes
    source_ndims: bytes
    source_shapes: bytes


def _form(
    shape: Sequence[int],
    boxes: Sequence[LocalBox],
    box_sources: Sequence[int],
    source_shapes: Sequence[Sequence[int]],
    *,
    sharded: bool,
    replicated: bool,
) -> _Form:
    counts = array("q", (len(shape), len(boxes), len(source_shapes), sharded, replicated))
    offsets, sizes, local_offsets = array("q"), array("q"), array("q")
    for box in boxes:
        offsets.extend(box.offsets)
        sizes.extend(box.sizes)
        local_offsets.extend(box.local_offsets)
    columns = (
        *(counts, array("q", shape), offsets, sizes, local_offsets, array("q", box_sources)),
        *(array("q", map(len, source_shapes)), array("q", chain.from_iterable(source_shapes))),
    )
    return _Form(*map(array.tobytes, columns))


class _PlainForms(dict[tuple[int, ...], _Form]):
    """Forms of plain tensors by shape."""

    def __missing__(self, shape: tuple[int, ...]) -> _Form:
        zeros = (0,) * len(shape)
        form = self[shape] = _form(
            shape, [LocalBox(zeros, shape, zeros)], [0], [shape], sharded=False, replicated=True
        )
        return form


@dataclass(frozen=True, eq=False)
class _SourceFacts:
    """Facts of the sources that torch alone knows. `ask` raises RuntimeError for tensors without memory."""

    codes: npt.NDArray[np.uint8]
    pointers: Int64
    is_contiguous: npt.NDArray[np.bool_]
    is_lazy: npt.NDArray[np.bool_]
    is_cpu: npt.NDArray[np.bool_]
    is_cut: npt.NDArray[np.bool_]
    """Whether memory that the tensor has was given back: the storage was resized."""
    is_nowhere: npt.NDArray[np.bool_]
    """Whether the tensor has elements and no memory."""
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
        is_nowhere = (pointers == 0) & (items > 0)
        return cls(codes, pointers, is_contiguous, is_lazy, is_cpu, is_cut, is_nowhere, is_foreign)


@dataclass(eq=False)
class _Builder:
    """Takes tensors one by one; ``problems`` begin with the row at which they were met."""

    loading: bool
    fqns: list[str] = field(default_factory=list)
    forms: list[_Form] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    sourceless: dict[int, int] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)

    def add_all(self, state_dict: Mapping[str, Any]) -> None:
        plain_forms, layout_forms, cache = _PlainForms(), dict[int, _Form](), SpecCache()
        add_form, add_name = self.forms.append, self.fqns.append
        add_source, add_grad = self.sources.append, self.requires_grad.append
        for fqn, value in state_dict.items():
            kind = KINDS[type(value)]
            try:
                if kind == OBJECT:
                    self.objects[fqn] = value
                elif kind == PLAIN and not hasattr(value, "global_shape"):
                    add_form(plain_forms[value.shape])
                    add_name(fqn)
                    add_source(value)
                    add_grad(value.requires_grad)
                elif kind != DTENSOR or not self.add_dtensor(fqn, value, cache, layout_forms):
                    self.add_local(fqn, local_tensor(fqn, value, cache))
            except PlanError as error:
                self.note(str(error))
            except RuntimeError as error:
                self.note(_no_memory(fqn, value, error))

    def add(self, fqn: str, form: _Form, sources: Sequence[torch.Tensor], requires_grad: bool) -> None:
        self.forms.append(form)
        self.fqns.append(fqn)
        self.sources += sources
        self.requires_grad.append(requires_grad)

    def add_dtensor(
        self, fqn: str, tensor: DTensor, cache: SpecCache, layout_forms: dict[int, _Form]
    ) -> bool:
        """Add the usual DTensor, one box of a plain local tensor; False where it is another one."""
        source = local_part(tensor)
        if KINDS[type(source)] != PLAIN:
            return False
        layout = layout_of(fqn, spec_of(tensor), tensor.shape, cache)
        if layout is None or len(layout.boxes) != 1 or source.shape != layout.local_shape:
            return False
        form = layout_forms.get(id(layout))  # a layout, which the cache keeps, is of one shape
        if form is None:
            form = layout_forms[id(layout)] = _form(
                tensor.shape,
                layout.boxes,
                [0],
                [layout.local_shape],
                sharded=True,
                replicated=layout.replicated,
            )
        self.add(fqn, form, (source,), tensor.requires_grad)
        return True

    def add_local(self, fqn: str, local: LocalTensor | None) -> None:
        """Add a tensor of any number of boxes, in any number of local tensors."""
        if local is None:
            return
        if not local.pieces:
            code = self.sourceless[len(self.fqns)] = DTYPE_CODES.get(local.dtype, 0)
            if not code:
                self.note(f"{fqn!r}: dtype {local.dtype} cannot be stored")
        sources: list[torch.Tensor] = []
        box_sources = []
        for source, _ in local.pieces:
            if not sources or source is not sources[-1]:
                if KINDS[type(source)] != PLAIN:
                    self.note(f"{fqn!r}: its local part is a {type(source).__name__}, not a plain tensor")
                elif source.dtype != local.dtype:
                    self.note(f"{fqn!r}: its local part is {source.dtype}, the tensor {local.dtype}")
                sources.append(source)
            box_sources.append(len(sources) - 1)
        form = _form(
            local.shape,
            [box for _, box in local.pieces],
            box_sources,
            [source.shape for source in sources],
            sharded=local.sharded,
            replicated=local.replicated,
        )
        self.add(fqn, form, sources, local.requires_grad)

    def note(self, problem: str) -> None:
        self.problems.append((len(self.fqns), problem))

    def finish(self) -> RankState:
        """Make the columns; PlanError if anything cannot be stored."""
        counts = self._column("counts").reshape(-1, 5)
        ndims, boxes, sources, sharded, replicated = counts.T
        rows = np.arange(len(counts))
        item_tensors, source_rows = np.repeat(rows, boxes), np.repeat(rows, sources)
        source_start = starts(sources)
        facts = self._ask_sources(source_rows)
        count, values = len(item_tensors), len(self.objects)
        columns = SaveColumns(
            fqns=tuple(self.fqns),
            dtype_codes=self._row_codes(source_start, facts),
            requires_grad=np.array(self.requires_grad, np.uint8),
            shape_start=starts(ndims),
            shape_values=self._column("shape"),
            item_tensors=item_tensors,
            item_offsets=self._column("offsets"),
            item_sizes=self._column("sizes"),
            item_local_offsets=self._column("local_offsets"),
            item_sources=source_start[item_tensors] + self._column("box_sources"),
            item_sharded=sharded[item_tensors].astype(np.uint8),
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
            starts(self._column("source_ndims")),
            self._column("source_shapes"),
        )
        others = replicated[item_tensors].astype(np.uint8)
        return RankState(columns, memory, list(self.objects.values()), others)

    def _column(self, name: str) -> Int64:
        """Return the values of all forms, one after the other."""
        return np.frombuffer(b"".join(map(attrgetter(name), self.forms)), np.int64)

    def _row_codes(self, source_start: Int64, facts: _SourceFacts) -> npt.NDArray[np.uint8]:
        """Return the dtype of each tensor, which all of its sources have."""
        codes = np.zeros(len(self.fqns), np.uint8)
        filled = np.diff(source_start) > 0
        codes[filled] = facts.codes[source_start[:-1][filled]]
        for row, code in self.sourceless.items():
            codes[row] = code
        return codes

    def _stride_orders(self, source_rows: Int64, facts: _SourceFacts) -> dict[int, tuple[int, ...]]:
        """Return by tensor the order of dimensions in memory, where that is dense but not C-ordered."""
        orders = {}
        for number in np.flatnonzero(~facts.is_contiguous).tolist():
            order = _dense_order(self.sources[number])
            if order is not None:
                orders[int(source_rows[number])] = order
        return orders

    # -- sources ---------------------------------------------------------------------------------------------

    def _ask_sources(self, rows: Int64) -> _SourceFacts:
        """Ask for the facts of all sources; PlanError for those that cannot be stored.

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
        if self.problems or facts is None or (facts.is_cut | facts.is_nowhere | (facts.codes == 0)).any():
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

    def _raise_problems(self, rows: Int64) -> NoReturn:
        """One error for all tensors that cannot be stored, in the order of the state dict."""
        problems = [*self.problems]
        for row, source in zip(rows.tolist(), self.sources, strict=True):
            if KINDS[type(source)] == PLAIN and (fault := _fault(self.fqns[row], source)) is not None:
                problems.append((row, fault))
        texts = [text for _, text in sorted(problems, key=itemgetter(0))]
        shown = texts[:_MAX_LISTED]
        more = f"; and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
        raise PlanError(
            f"tensors that cannot be {'loaded into' if self.loading else 'saved'}: {'; '.join(shown)}{more}",
            problems=shown,
        )


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """List the dimensions from slowest to fastest of a tensor that is dense, but not C-ordered."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    is_other = order != tuple(range(tensor.ndim))
    return order if is_other and tensor.permute(order).is_contiguous() else None


def _extent(tensor: torch.Tensor) -> int:
    """Count the items of memory from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fault(fqn: str, tensor: torch.Tensor) -> str | None:
    """Return why a plain local tensor cannot be stored, and what to do about it."""
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
    """Return what this rank has of a flat state dict, in its order, without digests and ties.

    The local tensors may require grad, so copy them under no_grad.

    Raises PlanError naming every tensor that cannot be stored (sparse, quantized, meta, freed, unknown dtype)
    and what to do about it.
    """
    builder = _Builder(loading=purpose == "load")
    builder.add_all(state_dict)
    return builder.finish()


def item_ties(local: RankState) -> Int64:
    """Find ``SaveColumns.item_ties`` of a rank's tensors: boxes with the same bytes at the same place in
    memory, as tied weights have, become one record."""
    columns, sources, pointers = local.columns, local.memory.tensors, local.memory.pointers
    ties = np.full(len(columns.item_tensors), -1, np.int64)
    _, inverse, counts = np.unique(pointers, return_inverse=True, return_counts=True)
    shared = (counts[inverse] > 1) & (pointers != 0)
    if not shared.any():
        return ties
    keys: dict[int, Any] = {}
    for row in np.flatnonzero(shared[columns.item_sources]).tolist():
        source = sources[columns.item_sources[row]]
        box = slice(int(columns.box_start[row]), int(columns.box_start[row + 1]))
        place = (columns.item_sizes[box].tobytes(), columns.item_local_offsets[box].tobytes())
        keys[row] = (source.data_ptr(), source.device, source.dtype, source.shape, source.stride(), place)
    repeated = {key for key, count in Counter(keys.values()).items() if count > 1}
    numbers: dict[Any, int] = {}
    for row, key in keys.items():
        if key in repeated:
            ties[row] = numbers.setdefault(key, len(numbers))
    return ties
