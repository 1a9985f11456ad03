"""Digests: of the logical bytes, cheap, never zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp.planners.digest import (
    SAMPLE_BYTES,
    WHOLE_LIMIT_BYTES,
    ReplicaCheck,
    block_sums,
    digest_bytes,
    digest_tensors,
)


def digest_tensor(tensor: torch.Tensor, check: ReplicaCheck = "sampled") -> int:
    """Digest of one tensor; 0 with ``off``."""
    return int(digest_tensors([tensor], check)[0])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("check", ["sampled", "full"])
@pytest.mark.parametrize("rows", [0, 3, 1000], ids=str)
def test_strides_do_not_change_a_digest(dtype: torch.dtype, check: str, rows: int) -> None:
    """The same values in another memory order have the same digest, small and large, sampled or whole."""
    tensor = (torch.arange(rows * 257).reshape(rows, 257) % 100).to(dtype)
    other = tensor.t().contiguous().t()
    assert other.is_contiguous() == (rows < 2)
    assert digest_tensor(tensor, check) == digest_tensor(other, check) != 0  # type: ignore[arg-type]


def test_small_tensors_are_read_whole() -> None:
    """Any changed element of a tensor up to the limit changes the digest."""
    tensor = torch.zeros(WHOLE_LIMIT_BYTES, dtype=torch.uint8)
    before = digest_tensor(tensor)
    for place in (0, 5000, 33333, WHOLE_LIMIT_BYTES - 1):
        tensor[place] = 1
        assert digest_tensor(tensor) != before
        tensor[place] = 0
    assert digest_tensor(tensor) == before


def test_large_tensors_are_sampled_at_head_tail_and_between() -> None:
    """Changes at both ends are seen, a single byte between samples only by the full check."""
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    sampled, full = digest_tensor(tensor), digest_tensor(tensor, "full")
    for place in (0, (1 << 20) - 1, (1 << 20) // 3 // 16 * 16 + SAMPLE_BYTES):
        tensor[place] = 1
        assert digest_tensor(tensor, "full") != full
    assert digest_tensor(tensor) != sampled
    tensor.zero_()
    tensor[SAMPLE_BYTES + 1] = 1
    assert digest_tensor(tensor) == sampled


@pytest.mark.parametrize(
    "digest", [lambda data: digest_tensor(data, "full"), block_sums], ids=["crc", "sums"]
)
def test_every_bit_counts(digest: Callable[[torch.Tensor], Any]) -> None:
    """Wherever it is, also where two differ in the highest bit of a word; and memory may begin anywhere."""
    memory = torch.randint(256, ((2 << 20) + 8,), dtype=torch.uint8)
    data = memory[3 : 3 + (2 << 20) + 5]
    before = torch.as_tensor(digest(data))
    assert torch.equal(torch.as_tensor(digest(data.clone())), before)
    for places in ((0,), ((1 << 20) - 1,), (1 << 20,), (-1,), (3, 7), (3, (64 << 10) + 3), (-2, -6)):
        changed = data.clone()
        changed[list(places)] ^= 0x80
        assert not torch.equal(torch.as_tensor(digest(changed)), before), places


def test_samples_cover_all_of_a_changed_tensor() -> None:
    """Training changes values everywhere, and one changed quarter is enough to be seen."""
    tensor = torch.zeros(1 << 20)
    before = digest_tensor(tensor)
    for quarter in range(4):
        changed = tensor.clone()
        changed[quarter << 18 : (quarter + 1) << 18] = 1e-8
        assert digest_tensor(changed) != before


def test_zero_is_reserved() -> None:
    """Nothing has digest 0 but what was not looked at."""
    assert digest_bytes(b"") != 0
    assert digest_tensor(torch.zeros(0)) == digest_bytes(b"")
    assert digest_tensors([torch.zeros(3)], "off").tolist() == [0]


def test_gradients_and_scalars_are_no_obstacle() -> None:
    """Parameters, 0-d tensors and slices of a larger tensor."""
    base = torch.arange(12.0).reshape(3, 4)
    assert digest_tensor(torch.nn.Parameter(base[1])) == digest_tensor(base[1].clone())
    assert digest_tensor(base[:, 1]) == digest_tensor(torch.tensor([1.0, 5.0, 9.0]))
    assert digest_tensor(torch.tensor(2.5)) == digest_tensor(torch.tensor([2.5]))
