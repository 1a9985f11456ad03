import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.staging import DefaultStager
from dcp.staging.copies import default_threads
from tests.dcp.staging.sources import TensorSpec, bits, collect, make_tensors, tensor_specs

MIB = 1 << 20


@settings(max_examples=60, deadline=None)
@given(specs=tensor_specs(), shared=st.booleans(), threads=st.integers(1, 3))
def test_every_dtype_stride_and_tie_is_staged_bit_for_bit(
    specs: list[TensorSpec], shared: bool, threads: int
) -> None:
    """Copies are contiguous, of equal shape and dtype, in the arena; what was one memory is one copy."""
    state = make_tensors(specs)
    local = collect(state)
    stager = DefaultStager(threads=threads)
    staged = stager.stage_local(local, shared=shared)
    staged.done.result(240)
    memory = staged.arena.bytes_tensor()
    for number, (source, copy) in enumerate(zip(local.sources, staged.local.sources, strict=True)):
        assert (copy.shape, copy.dtype, copy.is_contiguous()) == (source.shape, source.dtype, True)
        assert not copy.requires_grad
        assert bits(copy) == bits(source)
        offset = int(staged.offsets[number])
        assert offset % 64 == 0
        assert bytes(memory[offset : offset + copy.nbytes].numpy().tobytes()) == bits(source)
        if copy.numel():
            assert copy.data_ptr() == memory.data_ptr() + offset
            assert copy.untyped_storage().nbytes() == copy.nbytes
    for number, spec in enumerate(specs):
        if spec.memory == "tied" and number and not state[f"layer.{number}"].is_conj():
            assert staged.offsets[number] == staged.offsets[number - 1]
    staged.release()
    stager.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_tensors_are_cut_over_threads(threads: int) -> None:
    """Each byte is copied by one thread: of tensors larger than a share, odd ones, and small ones between."""
    state = {}
    for number, size in enumerate((21 * MIB + 3, 1, 130_000, 9 * MIB, 7, 200_001)):
        state[f"t{number}"] = torch.arange(size, dtype=torch.int64).mul_(number + 7).to(torch.uint8)
    state["transposed"] = torch.arange(3 * MIB, dtype=torch.int16).view(1024, -1).t()
    local = collect(state)
    stager = DefaultStager(threads=threads, guard="full")
    for _ in range(2):
        staged = stager.stage_local(local)
        staged.done.result(240)
        for source, copy in zip(local.sources, staged.local.sources, strict=True):
            assert torch.equal(source, copy)
        staged.arena.bytes_tensor().zero_()
        staged.release()
    stager.close()


def test_views_of_one_memory_that_differ_are_copied_each() -> None:
    """Equal addresses alone are no tie: shape, dtype and strides count."""
    whole = torch.arange(16.0).reshape(4, 4)
    state = {
        "whole": whole,
        "t": whole.t(),
        "head": whole[0],
        "bits": whole.view(torch.int32),
        "again": whole,
    }
    stager = DefaultStager()
    staged = stager.stage_local(collect(state))
    staged.done.result(240)
    assert torch.equal(staged.local.sources[1], whole.t())
    assert torch.equal(staged.local.sources[2], whole[0])
    assert torch.equal(staged.local.sources[3], whole.view(torch.int32))
    assert len(set(staged.offsets.tolist())) == 4
    assert staged.offsets[0] == staged.offsets[4]
    stager.close()


def test_the_share_of_cores_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host do not take each other's cores; a setting that is no number is ignored."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = default_threads()
    assert 1 <= alone <= 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert default_threads() == alone


def test_an_error_of_one_thread_is_raised_after_all_have_ended() -> None:
    """No thread still writes to the memory when the caller learns that the staging failed."""
    state = {"large": torch.ones(40 * MIB, dtype=torch.uint8), "small": torch.ones(3)}
    local = collect(state)
    stager = DefaultStager(threads=2)
    stager._machine.copier.close()
    staged_error = stager.stage_local(local).done.exception(240)
    assert isinstance(staged_error, RuntimeError)
    with stager.lock(1.0):
        state["small"].add_(1)
    stager.close()
