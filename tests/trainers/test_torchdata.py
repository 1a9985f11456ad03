"""`dcp.integrations.torchdata`: each sample once an epoch, also if resumed on other numbers of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, IterableDataset

import dcp
from dcp.errors import CheckpointError
from dcp.integrations.torchdata import RescalableDataLoader, RescalableSampler
from tests.support.examples import examples
from tests.support.ranks import run_ranks

WORLDS = st.sampled_from([1, 2, 3, 8])


class Numbers:
    """Data set of the numbers below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loaders(
    size: int, world_size: int, *, epoch: int = 1, batches: Sequence[int] = (2,), **options: Any
) -> Any:
    """Return the loaders of all ranks, in this process, with possibly different batch sizes."""
    made = []
    loader_options = {
        name: options.pop(name) for name in ("num_workers", "snapshot_every_n_steps") if name in options
    }
    for rank in range(world_size):
        sampler = RescalableSampler(Numbers(size), world_size, rank, seed=3, **options)
        sampler.set_epoch(epoch)
        batch_size = batches[rank % len(batches)]
        made.append(RescalableDataLoader(Numbers(size), batch_size, sampler=sampler, **loader_options))
    return made


def taken(iterator: Any, count: int | None = None) -> list[int]:
    """Return the samples of the next ``count`` batches, or of all."""
    seen: list[int] = []
    for number, batch in enumerate(iterator):
        seen += batch.tolist()
        if count is not None and number + 1 == count:
            break
    return seen


def resumed(old: Sequence[Any], new: Sequence[Any]) -> None:
    """Transfer the state of ``old`` loaders to ``new`` loaders as a save and a load do, without files."""
    states = [loader.state_dict()["ranks"] for loader in old]
    for rank, loader in enumerate(new):
        value = states[rank].value if len(old) == len(new) else None
        if value is None:
            value = states[0].rule([state.value for state in states], rank, len(new))
        loader.load_state_dict({"ranks": dcp.Rescale(value, states[0].rule)})


@examples(60)
@given(
    size=st.integers(0, 60),
    worlds=st.lists(WORLDS, min_size=2, max_size=5),
    steps=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    batches=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    even=st.booleans(),
    shuffle=st.booleans(),
)
def test_each_sample_is_seen_once_an_epoch(
    size: int, worlds: list[int], steps: list[int], batches: list[int], even: bool, shuffle: bool
) -> None:
    """Each sample is seen once over several resumes, with batch sizes by rank. With even=True, which pads all
    ranks to one length, only the padding of the last number of ranks may repeat samples."""
    seen: list[int] = []
    now = loaders(size, worlds[0], batches=batches, even=even, shuffle=shuffle)
    for world_size, count in zip(worlds[1:], steps, strict=False):
        count = min(count, -(-((size - len(set(seen))) // len(now)) // max(batches)))  # within the epoch
        for loader in now if count else ():
            seen += taken(loader, count)
        following = loaders(size, world_size, batches=batches, even=even, shuffle=shuffle)
        resumed(now, following)
        now = following
    for loader in now:
        seen += taken(loader)
    counts = Counter(seen)
    assert counts.keys() == set(range(size))
    assert even or set(counts.values()) <= {1}


@examples(30)
@given(
    size=st.integers(1, 40),
    world_size=WORLDS,
    count=st.integers(1, 5),
    every=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_equal_numbers_of_ranks_resume_exactly(
    size: int, world_size: int, count: int, every: int, drop_last: bool
) -> None:
    """The order equals that of an uninterrupted run, and of torch's `DistributedSampler`."""
    options: dict[str, Any] = {"drop_last": drop_last, "snapshot_every_n_steps": every}
    begun = loaders(size, world_size, **options)
    count = min(count, -(-len(begun[0].sampler) // 2))  # within the epoch
    first = [taken(loader, count) if count else [] for loader in begun]
    again = loaders(size, world_size, **options)
    resumed(begun, again)
    for rank, loader in enumerate(again):
        numbers: Any = Numbers(size)
        whole: Any = DistributedSampler(numbers, world_size, rank, seed=3, drop_last=drop_last)
        whole.set_epoch(1)
        assert first[rank] + taken(loader) == list(whole)
        assert len(loader.sampler) == len(whole)


def test_prefetched_batches_are_not_consumed() -> None:
    """Prefetched batches do not count; any number of ranks or workers resumes after the consumed batches."""
    begun = loaders(24, 1, num_workers=2)
    seen = taken(begun[0], 3)
    for world_size, workers in ((1, 2), (1, 0), (2, 1)):
        after = loaders(24, world_size, num_workers=workers)
        resumed(begun, after)
        rest = [taken(loader) for loader in after]
        assert sorted(seen + [sample for part in rest for sample in part]) == list(range(24))
        if world_size == 1:
            assert seen + rest[0] == taken(loaders(24, 1)[0])


def test_another_order_is_an_error() -> None:
    """A position in another order of samples is refused."""
    begun = loaders(12, 2)
    taken(begun[0], 1)
    for options in ({"shuffle": False}, {"size": 13}):
        size = int(options.pop("size", 12))
        with pytest.raises(CheckpointError, match="would skip the wrong samples"):
            resumed(begun, loaders(size, 2, **options))
    begun[1].sampler.set_epoch(2)
    with pytest.raises(CheckpointError, match="epoch differs"):
        resumed(begun, loaders(12, 3))


class Endless(IterableDataset[int]):
    """Iterable data set, whose order is unknown to the loader."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"dataset": Endless()}, "dcp.Rescale"),
        ({"dataset": Numbers(3), "batch_sampler": [[0]]}, "batch_size=None"),
        ({"dataset": Numbers(3), "sampler": range(3)}, "RescalableSampler"),
        ({"dataset": Numbers(3), "in_order": False}, "in_order"),
    ],
)
def test_arguments_without_a_position_are_refused(arguments: dict[str, Any], advice: str) -> None:
    """Arguments without a position are refused, and the error says what to use."""
    with pytest.raises((TypeError, ValueError), match=advice):
        RescalableDataLoader(**arguments)


def trained(rank: int, world_size: int, root: str, steps: int | None) -> list[int]:
    """Train an epoch from the last saved position, and return the samples of this rank."""
    loader = RescalableDataLoader(Numbers(50), 2, shuffle=True)
    state = {"loader": loader, "w": torch.ones(2)}
    with dcp.CheckpointManager(root, handle_sigterm=False) as manager:
        restored = manager.restore(state)
        step = restored.step if restored else 0
        seen = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if number + 1 == steps:
                break
        manager.save(step + 1, state)
    return seen


def test_real_ranks_see_each_sample_once(tmp_path: Path) -> None:
    """2, then 3, then 2 real ranks, resumed from checkpoints, see each of 50 samples once."""
    seen: list[int] = []
    for world_size, steps in ((2, 3), (3, 2), (2, None)):
        for part in run_ranks(world_size, trained, str(tmp_path), steps):
            seen += part
    assert len(seen) == 50 and set(seen) == set(range(50))
