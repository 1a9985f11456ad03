"""The tensors of one rank as columns: what is taken, and what is refused with which advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import dcp
from dcp.planners.layout.local import DTYPE_CODES, collect_tensors
from dcp.planners.layout.local_tensor import is_tensor_like, local_tensor
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes


class Wrapper(torch.Tensor):
    """A subclass made of an inner tensor, as torchao's are."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapper:
        """A tensor without memory of its own."""
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        wrapper.wrapped = wrapped
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(
            *(value.wrapped if isinstance(value, Wrapper) else value for value in args), **(kwargs or {})
        )


class Opaque(torch.Tensor):
    """One that does not tell what it is made of, as Transformer Engine's were."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Opaque:
        """A tensor without memory of its own."""
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Rows(torch.Tensor):
    """A subclass that implements torch's checkpointing protocol: rows 2 and 3 of a tensor of 8 rows."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
        data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([8, 3]))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_plain_tensors_become_columns() -> None:
    """Names, dtypes, shapes, boxes of tensors and parameters, in order; other values are objects."""
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    state = collect_tensors({"w": weight, "lr": 0.1, "s": torch.tensor(1)})
    local = state.columns
    assert local.fqns == ("w", "s")
    assert [dtypes.BY_CODE[code].name for code in local.dtype_codes.tolist()] == ["bfloat16", "int64"]
    assert local.requires_grad.tolist() == [1, 0]
    assert local.shape_values.tolist() == local.item_sizes.tolist() == [2, 3]
    assert local.shape_start.tolist() == [0, 2, 2]
    assert state.sources[0] is weight
    assert (local.objects.fqns, state.objects) == (("lr",), [0.1])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_stored_dtype_has_its_code() -> None:
    """Each dtype of the format that torch has can be planned."""
    for dtype in dtypes.BY_NAME.values():
        tensor = torch.empty(4, dtype=getattr(torch, dtype.name))
        assert collect_tensors({"t": tensor}).columns.dtype_codes.tolist() == [dtype.code]


def test_order_in_memory_is_noted() -> None:
    """Dense tensors that are not C-ordered keep their order of dimensions; views with holes have none."""
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    local = collect_tensors(
        {"c": image, "t": torch.zeros(3, 2).t(), "h": torch.zeros(4, 4)[:, ::2], "p": image[0]}
    )
    assert local.columns.stride_orders == {0: (0, 2, 3, 1), 1: (1, 0), 3: (1, 2, 0)}


def test_the_protocol_of_torch_is_honoured() -> None:
    """A subclass with __create_write_items__ says its boxes and shards itself."""
    local = collect_tensors({"rows": torch.ones(2, 3).as_subclass(Rows)})
    assert local.columns.shape_values.tolist() == [8, 3]
    assert local.columns.item_offsets.tolist() == [2, 0]
    assert local.sources[0].sum() == 6


class TwoParts(Rows):
    """Rows 0 and 1 of a tensor of 4 rows in a shard of its own, row 3 in another one."""

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        items = []
        for first, rows in ((0, 2), (3, 1)):
            chunk = ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([rows, 3]))
            data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([4, 3]))
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        plain = self.as_subclass(torch.Tensor)
        return plain[:2] if index.offset == torch.Size([0, 0]) else plain[2:]


def test_columns_say_of_each_tensor_what_it_says_alone() -> None:
    """Tensors of many forms, mixed, some of several boxes or none: each has the rows it would have alone."""
    state = {
        "a": torch.zeros(2, 3),
        "two": torch.ones(3, 3).as_subclass(TwoParts),
        "b": torch.zeros(2, 3, dtype=torch.int64),
        "scalar": torch.tensor(1.0),
        "none": 5,
        "empty": torch.zeros(0, 4),
        "rows": torch.ones(2, 3).as_subclass(Rows),
        "c": torch.nn.Parameter(torch.zeros(3, 2)),
        "d": torch.zeros(2, 3).t(),
    }
    collected, own_sources = collect_tensors(state), iter(range(100))
    local, memory = collected.columns, collected.memory
    items = list(zip(local.item_tensors.tolist(), local.item_sources.tolist(), strict=True))
    assert local.fqns == tuple(fqn for fqn in state if fqn != "none")
    for row, fqn in enumerate(local.fqns):
        alone = local_tensor(fqn, state[fqn], {})
        assert alone is not None
        begin, end = local.shape_start[row], local.shape_start[row + 1]
        assert tuple(local.shape_values[begin:end].tolist()) == alone.shape
        assert local.dtype_codes[row] == DTYPE_CODES[alone.dtype]
        assert local.requires_grad[row] == alone.requires_grad
        mine = [item for item, (tensor, _) in enumerate(items) if tensor == row]
        assert len(mine) == len(alone.pieces)
        for item, piece in zip(mine, alone.pieces, strict=True):
            box = slice(int(local.box_start[item]), int(local.box_start[item + 1]))
            columns = (local.item_offsets, local.item_sizes, local.item_local_offsets)
            assert tuple(tuple(column[box].tolist()) for column in columns) == piece.box
            assert (local.item_sharded[item], collected.replicated[item]) == (
                alone.sharded,
                alone.replicated,
            )
            source = items[item][1]
            assert source == next(own_sources)
            assert memory.pointers[source] == piece.source.data_ptr()
            begin, end = memory.shape_start[source : source + 2]
            assert tuple(memory.shape_values[begin:end].tolist()) == piece.source.shape
            assert memory.is_plain[source] == piece.source.is_contiguous()


def test_what_can_be_read_into_where_it_is() -> None:
    """Dense memory of the CPU is; transposed, strided, and lazily negated or conjugated views are not."""
    complex_numbers = torch.zeros(2, 2, dtype=torch.complex64)
    state = {
        "dense": torch.nn.Parameter(torch.zeros(2, 3)),
        "transposed": torch.zeros(2, 3).t(),
        "gaps": torch.zeros(2, 4)[:, ::2],
        "negated": complex_numbers.conj().imag,
        "conjugated": complex_numbers.conj(),
    }
    destinations = collect_tensors(state, purpose="load").memory
    assert destinations.is_plain.tolist() == [True, False, False, False, False]
    assert destinations.pointers[0] == state["dense"].data_ptr()
    assert destinations.tensors[4] is state["conjugated"]
    assert [dtypes.BY_CODE[code].name for code in destinations.dtype_codes.tolist()[3:]] == [
        "float32",
        "complex64",
    ]


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.zeros(2, 2).to_sparse(), "to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "dequantize"),
    "meta": (lambda: torch.zeros(2, device="meta"), "to_empty"),
    "wrapper": (lambda: Wrapper(torch.zeros(2)), "subclass made of inner tensors"),
    "opaque": (lambda: Opaque(torch.zeros(2)), "no __tensor_flatten__"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "unbind()"),
}


@pytest.mark.filterwarnings("ignore")
def test_unsupported_tensors_are_all_named_with_advice() -> None:
    """One error names every tensor that cannot be saved, and says what to do with each kind."""
    with pytest.raises(PlanError) as caught:
        collect_tensors({"fine": torch.zeros(1), **{name: make() for name, (make, _) in REFUSED.items()}})
    problems = caught.value.problems
    assert len(problems) == len(REFUSED)
    for problem, (name, (_, advice)) in zip(problems, REFUSED.items(), strict=True):
        assert repr(name) in problem
        assert advice in problem


@pytest.mark.parametrize("use", [dcp.save, dcp.load])
def test_a_jagged_tensor_is_named(tmp_path: Path, use: Callable[..., Any]) -> None:
    """It is made of inner tensors and has a size that is no number."""
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    dcp.save({}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match=r"'m\.x': nested tensors cannot be stored; store its values\(\)"):
        use({"m": {"x": jagged}}, checkpoint_id=tmp_path)


def test_lazy_views_are_saved_by_value_and_loaded_into_as_they_are() -> None:
    """A conjugated or negated view is resolved to save it; to load, it must stay the caller's memory."""
    conjugated = torch.tensor([1 + 2j]).conj()
    state = {"conjugated": conjugated, "negated": conjugated.imag, "again": conjugated.resolve_conj()}
    saved = collect_tensors(state).sources
    assert [source.is_conj() or source.is_neg() for source in saved] == [False] * 3
    assert [source.tolist() for source in saved] == [[1 - 2j], [-2.0], [1 - 2j]]
    wanted = collect_tensors(state, purpose="load").sources
    assert wanted[0].data_ptr() == conjugated.data_ptr() and wanted[0].is_conj()


def test_freed_memory_is_refused() -> None:
    """A parameter whose storage FSDP resized to nothing has no values to save."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"'w'.*memory was freed"):
        collect_tensors({"w": tensor})


@pytest.mark.parametrize("purpose", ["save", "load"])
def test_memory_that_was_freed_in_part_is_refused(purpose: Literal["save", "load"]) -> None:
    """Beyond the end of a storage that was made smaller lies memory of others, also for views of it."""
    flat = torch.zeros(12)
    state = {"rows": flat.view(3, 4).t(), "tail": flat[8:], "head": flat[:4], "none": flat[12:]}
    collect_tensors(state, purpose=purpose)
    flat.untyped_storage().resize_(4 * 10)
    with pytest.raises(PlanError) as caught:
        collect_tensors(state, purpose=purpose)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["'rows'", "'tail'"]
    assert all("freed in part" in problem for problem in caught.value.problems)


def test_what_counts_as_a_tensor() -> None:
    """Tensors of any class do, numbers and containers do not."""
    assert is_tensor_like(torch.zeros(1))
    assert is_tensor_like(torch.nn.Parameter(torch.zeros(1)))
    assert is_tensor_like(torch.zeros(2, 3).as_subclass(Rows))
    assert not any(is_tensor_like(value) for value in (1, "a", None, [torch.zeros(1)]))
