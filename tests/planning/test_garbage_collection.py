"""Planning does not collect garbage in between, and leaves the collector as it was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.planners.garbage_collection import garbage_collection_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """On before and after each test."""
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_within_the_block_and_on_after_it() -> None:
    """However the block ends."""
    with garbage_collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="wrong"), garbage_collection_paused():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_one_that_is_off_stays_off() -> None:
    """Who has switched it off wants it so."""
    gc.disable()
    with garbage_collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.parametrize("is_on", [True, False])
def test_loads_leave_it_as_it_was(tmp_path: Path, is_on: bool) -> None:
    """Also those that fail while they plan; and nothing is collected while a load looks at its tensors."""
    state = {f"w{n}": torch.full((3,), n) for n in range(2000)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    seen = []

    class Watching(dict[str, Any]):
        def values(self) -> Any:
            seen.append((sys._getframe(1).f_globals["__name__"], gc.isenabled()))
            return super().values()

    (gc.enable if is_on else gc.disable)()
    dcp.load({"in": Watching(state)} | state, checkpoint_id=tmp_path, no_dist=True, allow_partial_load=True)
    flattened = [collects for name, collects in seen if name == "dcp.planners.flatten"]
    assert flattened
    assert not any(flattened)
    assert gc.isenabled() is is_on
    with pytest.raises(dcp.MissingKeyError):
        dcp.load({"absent": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert gc.isenabled() is is_on
