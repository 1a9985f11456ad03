"""The tensors of one rank as columns: what is taken, and what is refused with which advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp.planners.local import collect_tensors
from dcp.planners.local_tensor import is_tensor_like
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
    local = collect_tensors({"w": weight, "lr": 0.1, "s": torch.tensor(1)})
    assert local.fqns == ("w", "s")
    assert [dtypes.BY_CODE[code].name for code in local.dtype_codes.tolist()] == ["bfloat16", "int64"]
    assert local.requires_grad.tolist() == [1, 0]
    assert local.shape_values.tolist() == local.item_sizes.tolist() == [2, 3]
    assert local.shape_start.tolist() == [0, 2, 2]
    assert local.sources[0] is weight
    assert local.objects == {"lr": 0.1}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_stored_dtype_has_its_code() -> None:
    """Each dtype of the format that torch has can be planned."""
    for dtype in dtypes.BY_NAME.values():
        tensor = torch.empty(4, dtype=getattr(torch, dtype.name))
        assert collect_tensors({"t": tensor}).dtype_codes.tolist() == [dtype.code]


def test_order_in_memory_is_noted() -> None:
    """Dense tensors that are not C-ordered keep their order of dimensions; views with holes have none."""
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    local = collect_tensors(
        {"c": image, "t": torch.zeros(3, 2).t(), "h": torch.zeros(4, 4)[:, ::2], "p": image[0]}
    )
    assert local.stride_orders == {0: (0, 2, 3, 1), 1: (1, 0), 3: (1, 2, 0)}


def test_the_protocol_of_torch_is_honoured() -> None:
    """A subclass with __create_write_items__ says its boxes and shards itself."""
    local = collect_tensors({"rows": torch.ones(2, 3).as_subclass(Rows)})
    assert local.shape_values.tolist() == [8, 3]
    assert local.item_offsets.tolist() == [2, 0]
    assert local.sources[0].sum() == 6


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.zeros(2, 2).to_sparse(), "to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "to_dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "dequantize"),
    "meta": (lambda: torch.zeros(2, device="meta"), "to_empty"),
    "wrapper": (lambda: Wrapper(torch.zeros(2)), "subclass made of inner tensors"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "memory of its own"),
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


def test_what_counts_as_a_tensor() -> None:
    """Tensors of any class do, numbers and containers do not."""
    assert is_tensor_like(torch.zeros(1))
    assert is_tensor_like(torch.nn.Parameter(torch.zeros(1)))
    assert is_tensor_like(torch.zeros(2, 3).as_subclass(Rows))
    assert not any(is_tensor_like(value) for value in (1, "a", None, [torch.zeros(1)]))
