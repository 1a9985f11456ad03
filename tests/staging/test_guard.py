"""The guard of staged copies: a copy that differs from the state is an error with the tensors' names."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dcp.errors import StagingError
from dcp.staging import DefaultStager, check_staged, sample_state
from tests.staging.sources import TensorSpec, bits, make_tensors, tensor_specs
from tests.support.examples import examples


def copied(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Stage a state by a new stager, and return the copy."""
    stager = DefaultStager(**options)
    staged = stager.stage(state)
    found = staged.result(240) if isinstance(staged, Future) else staged
    stager.close()
    return found


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements as integers in place."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.itemsize])


@examples(40)
@given(specs=tensor_specs(), guard=st.sampled_from(["sampled", "full", "off"]), threads=st.integers(1, 3))
def test_every_dtype_stride_and_tie_is_staged_bit_for_bit(
    specs: list[TensorSpec], guard: str, threads: int
) -> None:
    """No tensor is a false alarm: copies are contiguous, with equal shape, dtype and ties."""
    state = make_tensors(specs)
    samples = sample_state(state)
    staged = copied(state, guard=guard, threads=threads)
    check_staged(state, staged, samples)
    for number, (name, source) in enumerate(state.items()):
        copy = staged[name]
        assert (copy.shape, copy.dtype, copy.requires_grad) == (source.shape, source.dtype, False)
        assert bits(copy) == bits(source), name
        if specs[number].memory == "tied" and number and source.numel() and not source.is_conj():
            assert copy.data_ptr() == staged[f"layer.{number - 1}"].data_ptr()


@examples(40)
@given(specs=tensor_specs(), data=st.data())
def test_a_tensor_overwritten_between_sample_and_copy_is_found(
    specs: list[TensorSpec], data: st.DataObject
) -> None:
    """Samples find exactly the tensors that were overwritten, for any memory layout."""
    state = make_tensors(specs)
    name = data.draw(st.sampled_from([*state]))
    victim = state[name]
    assume(victim.numel() and victim.itemsize < 16 and 0 not in victim.stride() and not victim.is_conj())
    samples = sample_state(state)
    patterns(victim).bitwise_not_()
    same_memory = [other for other, tensor in state.items() if tensor.data_ptr() == victim.data_ptr()]
    with pytest.raises(StagingError) as caught:
        check_staged(state, copied(state), samples)
    assert set(caught.value.fqns) == {*same_memory} >= {name}


@examples(30)
@given(count=st.integers(1, 5000), data=st.data())
def test_full_finds_every_changed_byte(count: int, data: st.DataObject) -> None:
    """With guard='full' any changed byte is found; for a few elements the sampled guard finds it too."""
    state = {"w": torch.arange(count, dtype=torch.int16)}
    samples = sample_state(state, "full" if count > 8 else "sampled")
    state["w"][data.draw(st.integers(0, count - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StagingError, match="'w'"):
        check_staged(state, {"w": state["w"].clone()}, samples)


def test_different_views_of_one_memory_are_copied() -> None:
    """Views with equal addresses but other shapes, dtypes or strides are not tied."""
    whole = torch.arange(16.0).reshape(4, 4)
    state = {"whole": whole, "t": whole.t(), "head": whole[0], "bits": whole.view(torch.int32)}
    staged = copied({**state, "again": whole})
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor), name
    assert len({staged[name].data_ptr() for name in state}) == 4
    assert staged["whole"].data_ptr() == staged["again"].data_ptr()


def refusal(state: dict[str, Any], staged: dict[str, Any]) -> tuple[list[str], str]:
    """Return the refused names and the message."""
    with pytest.raises(StagingError) as caught:
        check_staged(state, staged, sample_state(state))
    assert caught.value.count == len(caught.value.fqns)
    return [*caught.value.fqns], str(caught.value)


def test_wrong_copies_of_a_state_are_refused() -> None:
    """A copy that shares memory with the state, a cache that was not refreshed, and missing, cast or reshaped
    tensors are refused."""
    state: dict[str, Any] = {"weight": torch.arange(10_000.0), "bias": torch.ones(3)}
    cache = {name: value.clone() for name, value in state.items()}
    assert refusal(state, dict(state))[0] == ["weight", "bias"]
    names, message = refusal(state, cache | {"bias": state["weight"][50:53]})
    assert names == ["bias"] and "share memory with the state" in message
    check_staged(state, cache, sample_state(state))
    state["bias"].mul_(2)
    assert refusal(state, cache)[0] == ["bias"]
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": {"d": torch.ones(4)}}
    names, message = refusal(state, {"a": torch.ones(4).bfloat16(), "b": torch.ones(2, 2), "c": {}})
    assert len(names) == 3 and "'c.d' is missing" in message
    assert "'a' is torch.bfloat16 of shape (4,)" in message
    assert "'b' is torch.float32 of shape (2, 2)" in message
