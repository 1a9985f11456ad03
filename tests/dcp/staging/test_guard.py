from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.staging import AsyncStager

from dcp.staging import DefaultStager, check_staged, sample_state
from dcp.staging.copier import Slot, Staging, StateCopier
from dcp.staging.copies import resolved
from dcp.staging.guarding.samples import Guard, Samples
from dcp.staging.guarding.windows import Windows, read_windows
from dcp.staging.layout import SourceStructure, pointers_of
from dcp.staging.memory.arena import HostArena
from dcp.storage.errors import StagingError
from tests.dcp.staging.sources import TensorSpec, bits, make_tensors, tensor_specs

FAST = settings(max_examples=40, deadline=None)


def begun(tensors: list[torch.Tensor], guard: Guard = "sampled") -> Staging:
    """A staging that has looked at its sources and copied nothing yet."""
    return StateCopier(guard, 1).begin(
        Slot(HostArena()), tensors, lambda first: SourceStructure.of(tensors, first)
    )


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, where they are."""
    return tensor.detach().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )


class Itself(AsyncStager):
    """A stager that copies nothing."""

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to close."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state itself."""
        return dict(state_dict)


class Stale(Itself):
    """A stager whose cache is never refreshed."""

    cache: dict[str, Any] | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The first copy, for ever."""
        if self.cache is None:
            self.cache = {name: value.clone() for name, value in state_dict.items()}
        return self.cache


@FAST
@given(specs=tensor_specs(), guard=st.sampled_from(["sampled", "full"]))
def test_what_does_not_change_passes(specs: list[TensorSpec], guard: Guard) -> None:
    """No false alarm for any dtype, stride or tie, and the copies are the sources bit for bit."""
    tensors = [resolved(tensor) for tensor in make_tensors(specs).values()]
    staging = begun(tensors, guard)
    assert staging.run() == []
    for source, staged in zip(tensors, staging.layout.memory.tensors, strict=True):
        assert bits(source) == bits(staged)


@FAST
@given(specs=tensor_specs(), data=st.data())
def test_a_tensor_overwritten_between_sample_and_copy_is_found(
    specs: list[TensorSpec], data: st.DataObject
) -> None:
    """Samples see a tensor that became another, whatever its memory looks like, and no other one."""
    tensors = [resolved(tensor) for tensor in make_tensors(specs).values()]
    number = data.draw(st.integers(0, len(tensors) - 1))
    victim = tensors[number]
    assume(victim.numel() and victim.itemsize < 16 and 0 not in victim.stride())
    staging = begun(tensors)
    patterns(victim).bitwise_not_()
    same_memory = {row for row, other in enumerate(tensors) if other.data_ptr() == victim.data_ptr()}
    assert number in same_memory
    assert set(staging.run()) == same_memory


@FAST
@given(specs=tensor_specs(), serial=st.integers(0, 100))
def test_samples_are_the_same_however_they_are_read(specs: list[TensorSpec], serial: int) -> None:
    """Gathered over raw addresses as for host memory, or by torch as on a device: equal words."""
    tensors = [resolved(tensor).contiguous() for tensor in make_tensors(specs).values()]
    numels = np.array([tensor.numel() for tensor in tensors])
    windows = Windows.over(numels, np.array([tensor.itemsize for tensor in tensors]), serial)
    assert windows.positions.min(initial=0) >= 0
    assert bool((windows.positions + windows.lengths[windows.rows] <= numels[windows.rows]).all())
    pointers, everywhere = pointers_of(tensors), np.ones(len(tensors), np.bool_)
    by_address = read_windows(windows, tensors, pointers, everywhere).values()
    by_torch = read_windows(windows, tensors, pointers, ~everywhere).values()
    assert np.array_equal(by_address, by_torch)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_samples_see_every_element_of_a_tiny_tensor(dtype: torch.dtype, count: int) -> None:
    """Steps and counters of a few elements are compared whole."""
    for element in range(count):
        tensor = torch.arange(count).to(dtype)
        staging = begun([torch.zeros(100), tensor])
        patterns(tensor)[element] ^= 1
        assert staging.run() == [1]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 5000), data=st.data())
def test_full_sees_every_byte(count: int, data: st.DataObject) -> None:
    """With guard='full' any single change is found."""
    tensor = torch.arange(count, dtype=torch.int16)
    staging = begun([tensor], "full")
    tensor[data.draw(st.integers(0, count - 1))] ^= data.draw(st.integers(1, 255))
    assert staging.run() == [0]


def test_samples_of_later_saves_look_at_other_places() -> None:
    """A change that is missed once is not missed for ever: half of a percent is met within some saves."""
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    found = []
    for serial in range(40):
        samples = Samples.take([tensor], "sampled", serial=serial)
        copy = tensor.clone()
        copy[500_000:505_000] = 1
        found.append(bool(samples.differing([copy])))
    assert any(found)
    assert not all(found)


def test_off_compares_nothing() -> None:
    """guard='off' copies what is there."""
    tensor = torch.zeros(10)
    staging = begun([tensor], "off")
    tensor.fill_(1)
    assert staging.run() == []
    assert staging.layout.memory.tensors[0].tolist() == [1] * 10


def test_the_error_names_sixteen_tensors_and_counts_all() -> None:
    """Of many changed tensors some are named; facts carry the number."""
    stager = DefaultStager()
    state = {f"layer.{number:02}": torch.zeros(50) for number in range(30)}
    state["untouched"] = torch.zeros(50)
    samples = sample_state(state)
    for name in list(state)[:30]:
        state[name].add_(1)
    staged = stager.stage(state)
    assert isinstance(staged, dict)
    with pytest.raises(StagingError, match=r"30 tensors differ.*'layer.15' and 14 more") as caught:
        check_staged(state, staged, samples)
    assert caught.value.fqns == [f"layer.{number:02}" for number in range(16)]
    assert caught.value.count == 30
    stager.close()


def test_a_stager_that_returns_the_state_itself_is_caught() -> None:
    """Memory of the state in the staged dict is an error, for views and parts of it too."""
    state = {"weight": torch.arange(100.0), "bias": torch.ones(3)}
    samples = sample_state(state)
    with pytest.raises(StagingError, match="'weight', 'bias'"):
        check_staged(state, Itself().stage(state), samples)
    shifted = {"weight": state["weight"].clone(), "bias": state["weight"][50:53]}
    with pytest.raises(StagingError, match="in memory of the state") as caught:
        check_staged(state, shifted, samples)
    assert caught.value.fqns == ["bias"]


def test_a_stale_copy_is_caught() -> None:
    """A cache that is not refreshed passes once and fails after the state has changed."""
    stager = Stale()
    state = {"weight": torch.arange(10_000.0), "bias": torch.ones(3)}
    samples = sample_state(state)
    check_staged(state, stager.stage(state), samples)
    state["bias"].mul_(2)
    samples = sample_state(state, serial=1)
    with pytest.raises(StagingError, match="'bias'") as caught:
        check_staged(state, stager.stage(state), samples)
    assert caught.value.fqns == ["bias"]


def test_a_staged_dict_of_another_shape_is_caught() -> None:
    """Tensors that are missing, cast or reshaped are named with what is wrong."""
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": {"d": torch.ones(4)}}
    samples = sample_state(state)
    staged = {"a": torch.ones(4).bfloat16(), "b": torch.ones(2, 2), "c": {}}
    with pytest.raises(StagingError) as caught:
        check_staged(state, staged, samples)
    for part in (
        "'a' is torch.bfloat16 of shape (4,)",
        "'b' is torch.float32 of shape (2, 2)",
        "'c.d' is missing",
    ):
        assert part in str(caught.value)
    assert caught.value.count == 3


def test_nested_and_sparse_state_is_compared_as_far_as_it_can_be() -> None:
    """Names are the flat keys; what has no strided memory is passed over, not refused."""
    state: dict[str, Any] = {"list": [torch.ones(3), {"x": 1}], "sparse": torch.eye(3).to_sparse()}
    samples = sample_state(state)
    good = {"list": [torch.ones(3), {"x": 1}], "sparse": torch.eye(3).to_sparse()}
    check_staged(state, good, samples)
    bad = {"list": [torch.zeros(3), {"x": 1}], "sparse": torch.eye(3).to_sparse()}
    with pytest.raises(StagingError, match=r"'list\.0'"):
        check_staged(state, bad, samples)
