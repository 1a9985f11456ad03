"""torchdata: `StatefulDataLoader` with a position that resumes on any number of ranks.

A position counts the samples of an epoch that each rank has passed to the training, without prefetched
batches. Another number of ranks distributes the rest of the epoch anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from dcp.integrations.trainer_state import package_of
from dcp.planners.rescale import Rescale
from dcp.storage.errors import PlanError

with package_of("torchdata"):
    from torchdata.stateful_dataloader import StatefulDataLoader

logger = logging.getLogger(__name__)

_OF_AN_ORDER: Final = ("size", "shuffle", "seed")


def dealt(order: torch.Tensor, rank: int, world_size: int, *, drop_last: bool, even: bool) -> torch.Tensor:
    """Return a rank's part of ``order``: each of ``world_size`` ranks takes every ``world_size``-th sample.

    Parts have equal lengths like those of `DistributedSampler`: repeat samples from the start or, with
    ``drop_last``, drop the last ones. With ``even=False`` each sample occurs once and lengths differ by at
    most one.
    """
    more = -len(order) % world_size if even else 0
    if drop_last and even:
        order = order[: len(order) // world_size * world_size]
    elif more and len(order):
        order = torch.cat([order, order.repeat(-(-more // len(order)))[:more]])
    return order[rank::world_size]


def left_of(order: torch.Tensor, taken: Sequence[int]) -> torch.Tensor:
    """Return the rest of ``order``, distributed to ``len(taken)`` ranks, after each took ``taken``
    samples.
    """
    places = torch.arange(len(order))
    counts = torch.tensor(list(taken), dtype=torch.int64)
    return order[places // len(taken) >= counts[places % len(taken)]]


class RescalableSampler(DistributedSampler[Any]):
    """`torch.utils.data.DistributedSampler` that resumes within an epoch, on any number of ranks.

    ``dealt`` are earlier distributions of this epoch: samples taken by each rank. ``is_held``:
    `load_state_dict` has no effect.

    Args:
        dataset: As for torch's sampler, like all other parameters. Without a process group there is one
            rank.
        even: False lets parts differ by one sample instead of repeating or dropping samples. For evaluation
            only, because ranks with more batches wait for the others.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: bool = True,
    ) -> None:
        has_group = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if has_group else 1
        if rank is None:
            rank = dist.get_rank() if has_group else 0
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.even = even
        self.dealt: list[list[int]] = []
        self.taken = 0
        self.is_held = False
        self._resumes = False

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch."""
        if epoch != self.epoch:
            self.dealt, self.taken, self._resumes = [], 0, False
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of this rank's samples in a whole epoch."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        if self.even:
            return samples // self.num_replicas if self.drop_last else -(-samples // self.num_replicas)
        return len(range(self.rank, samples, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        """Yield indices of this rank, from the loaded position or the start of the epoch.

        The first sample uses up the position, because loaders discard iterators.
        """
        if not self._resumes:
            self.dealt, self.taken = [], 0
        self._resumes = False
        order = self._order()
        for counts in self.dealt:
            order = left_of(order, counts)
        part = dealt(order, self.rank, self.num_replicas, drop_last=self.drop_last, even=self.even)
        for index in part[self.taken :].tolist():
            self.taken += 1
            yield index

    def _order(self) -> torch.Tensor:
        """Return all samples of the epoch in the order of `DistributedSampler`."""
        samples = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return torch.arange(samples)
        return torch.randperm(samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data; torchdata keeps it with each prefetched batch."""
        return {
            "size": len(self.dataset),  # type: ignore[arg-type]
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": self.epoch,
            "dealt": [list(counts) for counts in self.dealt],
            "taken": self.taken,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position. Raises PlanError if the order of samples differs."""
        own = self.state_dict()
        for name in _OF_AN_ORDER:
            if state_dict[name] != own[name]:
                raise PlanError(
                    f"the position was saved with {name}={state_dict[name]!r}, but the sampler has "
                    f"{name}={own[name]!r} and would skip the wrong samples. Use the same sampler, or "
                    "exclude the position (exclude=...)"
                )
        if self.is_held:
            return
        self.epoch, self.taken = state_dict["epoch"], state_dict["taken"]
        self.dealt = [list(counts) for counts in state_dict["dealt"]]
        self._resumes = True


class RescalableDataLoader(StatefulDataLoader):  # type: ignore[misc]
    """`StatefulDataLoader` for `dcp.save` and `dcp.load` that resumes on any number of ranks and workers,
    with any batch size.

    Parameters are torchdata's. By default ``sampler`` is a `RescalableSampler`: each rank sees its part of
    the data set. The same number of ranks and workers also restores torchdata's own state. Without
    ``generator``, workers are seeded by the program's seed and the epoch, without drawing from the global
    generator.

    Raises:
        TypeError: For data sets and samplers of unknown order.
        ValueError: For ``in_order=False``.

    Examples:
        loader = RescalableDataLoader(dataset, batch_size=8, shuffle=True, num_workers=4)
        manager.save(step, {"model": model, "loader": loader})
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: RescalableSampler | None = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        _check(dataset, sampler, batch_sampler, options)
        if sampler is None:
            drop_last = bool(options.get("drop_last", False))
            sampler, shuffle = RescalableSampler(dataset, shuffle=bool(shuffle), drop_last=drop_last), None
        self._seeds_itself = options.get("generator") is None
        if self._seeds_itself:
            options["generator"] = torch.Generator()
        super().__init__(dataset, batch_size, shuffle, sampler, None, num_workers, **options)
        self._begin, self._batches, self._has_ended = 0, 0, False
        self._epoch: int | None = None
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield batches from the loaded position or the start of the epoch."""
        loaded, self._loaded = self._loaded, None
        self._begin, self._batches, self._has_ended = 0, 0, False
        self._epoch = self.sampler.epoch
        if self._seeds_itself:
            self.generator.manual_seed((torch.initial_seed() + self._epoch) % 2**63)
        if loaded is not None:
            if loaded["has_ended"]:
                self.sampler.is_held = True  # torchdata's state is that of the end
            elif loaded["position"]["epoch"] != self._epoch:
                super().load_state_dict({})  # the epoch was set after the load
            else:
                self._begin = loaded["position"]["taken"]
        batches = super().__iter__()
        self.sampler.is_held = False
        for batch in batches:
            self._batches += 1
            yield batch
        self._has_ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return a `Rescale` value of torchdata's state (in a tuple, stored as one value) and the
        position.
        """
        return {"ranks": Rescale(self._loaded or self._state(), rescaled_loader)}

    def _state(self) -> dict[str, Any]:
        position = self.sampler.state_dict()
        is_there = self._has_ended or self._epoch == position["epoch"]
        if is_there:
            position["taken"] = self._begin + self._batches * (self.batch_size or 1)
        else:  # before the first batch of an epoch
            position |= {"dealt": [], "taken": 0}
        return {
            "position": position,
            "has_ended": self._has_ended,
            "num_workers": self.num_workers,
            "torchdata": (super().state_dict() if is_there else None,),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position. Raises PlanError if the order of samples differs."""
        own = state_dict["ranks"]
        loaded = dict(own.value if isinstance(own, Rescale) else own)
        self._loaded = loaded
        (torchdata,) = loaded["torchdata"]
        position = loaded["position"]
        super().load_state_dict({})
        self.sampler.load_state_dict(position)
        if loaded["has_ended"]:
            self.sampler.load_state_dict(position | {"dealt": [], "taken": 0})
        if torchdata is not None and loaded["num_workers"] == self.num_workers:
            super().load_state_dict(torchdata)
        elif hasattr(self.dataset, "state_dict"):
            logger.warning(
                "another number of ranks or workers saved the checkpoint: the state of %s is not restored",
                type(self.dataset).__name__,
            )


def rescaled_loader(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Rescale states of `RescalableDataLoader`: distribute the remaining samples."""
    positions = [state["position"] for state in states]
    for name in (*_OF_AN_ORDER, "epoch", "dealt"):
        if any(position[name] != positions[0][name] for position in positions):
            raise PlanError(f"ranks saved positions of different epochs: {name} differs")
    has_ended = all(state["has_ended"] for state in states)
    counts = [position["taken"] for position in positions]
    now = {"dealt": [] if has_ended else [*positions[0]["dealt"], counts], "taken": 0}
    return states[0] | {"position": positions[0] | now, "has_ended": has_ended, "torchdata": (None,)}


def _check(dataset: Any, sampler: Any, batch_sampler: Any, options: Mapping[str, Any]) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            "an IterableDataset is not supported, because it distributes samples itself: use torchdata's "
            "StatefulDataLoader, and save the position as dcp.Rescale(state, rule)"
        )
    if batch_sampler is not None or isinstance(sampler, BatchSampler):
        raise TypeError(
            "batch_sampler= is not supported: pass sampler=, or a data set whose items are batches, with "
            "batch_size=None"
        )
    if sampler is not None and not isinstance(sampler, RescalableSampler):
        raise TypeError(
            f"sampler must be a dcp.integrations.torchdata.RescalableSampler, not {type(sampler).__name__}"
        )
    if not options.get("in_order", True):
        raise ValueError("in_order=False is not supported: batches have no resumable position")
