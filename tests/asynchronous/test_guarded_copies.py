"""A state that changes while it is copied. Internal: a copier of the test changes it at the right time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from dcp.errors import StagingError
from dcp.staging.copies import Copier
from dcp.staging.guard import Guard
from dcp.staging.stager import DefaultStager
from tests.support.versions import is_version, version_state

NAMES = ("model.w", "model.layers.0", "model.layers.1", "model.half", "large")


class _ChangingCopier(Copier):
    """A copier that changes a tensor after the samples are taken and before the copies begin."""

    change: Callable[[], object] = staticmethod(lambda: None)

    def run(self, tasks: Sequence[Callable[[], object]], most: int = 8) -> None:
        self.change()
        super().run(tasks, most)


def tensor_of(state: dict[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a state dict by its dotted name."""
    value: Any = state
    for key in name.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("guard", ["sampled", "full"])
def test_every_copy_of_a_save_is_guarded(guard: Guard) -> None:
    """A tensor that changes during any copy raises a StagingError with its name alone; the next copy is
    right. With the full guard only one element changes."""
    stager, copier = DefaultStager(guard=guard), _ChangingCopier(guard, 1)
    stager._copier = copier
    for number in range(2 * len(NAMES)):
        name = NAMES[number % len(NAMES)]
        state = version_state(number + 1, large=1 << 16)
        tensor = tensor_of(state, name)
        target = tensor.view(-1)[tensor.numel() // 2] if guard == "full" else tensor
        copier.change = partial(target.add_, 1)
        with pytest.raises(StagingError) as caught:
            stager.stage(state)
        named = [each for each in (*NAMES, "model.count", "model.empty") if f"'{each}'" in str(caught.value)]
        assert named == [name]
        copier.change = lambda: None
        copied: Any = stager.stage(version_state(number + 1, large=1 << 16))
        assert is_version(copied, number + 1, large=1 << 16)
    stager.close()
