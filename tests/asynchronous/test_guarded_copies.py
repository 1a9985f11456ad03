"""A state that changes while it is copied. Internal: only a copier of the test's own changes it in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging.copier import Memory, Slot, StateCopier
from dcp.staging.copies import HostCopier, HostCopies
from dcp.staging.guarding.samples import Guard
from dcp.staging.tree import StateTree
from dcp.storage.formats.index import Int64
from tests.support.versions import is_version, version_state

NAMES = ("model.w", "model.layers.0", "model.layers.1", "model.half", "large")


class _MeddlingCopier(HostCopier):
    """Changes something when the samples were taken, and before anything is copied."""

    def __init__(self) -> None:
        super().__init__(1)
        self.change: Callable[[], object] = lambda: None

    def copy(self, copies: HostCopies, rows: Int64) -> None:
        self.change()
        super().copy(copies, rows)


def tensor_of(state: dict[str, Any], name: str) -> torch.Tensor:
    """A tensor of a state dict by its dotted name."""
    value: Any = state
    for key in name.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.fixture
def slot() -> Iterator[Slot]:
    """Host memory that is used again by each copy."""
    tree = StateTree(version_state(1, large=1 << 16))
    made = Slot.of(None, Memory.for_sources(tree.sources, shared=False, pinned=False))
    yield made
    made.close()


@pytest.mark.parametrize("guard", ["sampled", "full"])
def test_every_copy_is_guarded_not_only_the_first(slot: Slot, guard: Guard) -> None:
    """A tensor (or, where all bytes are compared, one element of it) changes during each second copy:
    StagingError that names it and no other; the copy after it is whole."""
    copier = StateCopier(guard, 1)
    host = copier.host = _MeddlingCopier()
    for number in range(2 * len(NAMES)):
        name = NAMES[number % len(NAMES)]
        state = version_state(number + 1, large=1 << 16)
        tensor = tensor_of(state, name)
        target = tensor.view(-1)[tensor.numel() // 2] if guard == "full" else tensor
        host.change = partial(target.add_, 1)
        with pytest.raises(StagingError) as caught:
            copier.stage(slot, StateTree(state)).run()
        named = [each for each in (*NAMES, "model.count", "model.empty") if f"'{each}'" in str(caught.value)]
        assert named == [name]
        host.change = lambda: None
        copied = copier.stage(slot, StateTree(version_state(number + 1, large=1 << 16))).run()
        assert is_version(copied, number + 1, large=1 << 16)
    copier.close()
