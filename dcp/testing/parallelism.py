"""Check of a save and a load: every element of a model must be restored, on any number of ranks.

Model and optimizer get values that identify their position. The state is saved, loaded into a new model on
the same or other ranks, and compared. Lost, doubled, shuffled, stale and misplaced elements are reported by
name, rank and position. Any pair of functions can be tested.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.context import BaseContext
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from dcp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dcp.state_dict_loader import load as dcp_load
from dcp.state_dict_saver import save as dcp_save
from dcp.storage.errors import OptionError
from dcp.testing.judging import Report, SavedState, SavedTensor, StateFinding, Trial, judge
from dcp.testing.live_state import (
    Identity,
    LiveTensor,
    PartOf,
    Whole,
    bits_of,
    coded_bits,
    number_of,
    parameter_names,
    tensors_of,
    write_bits,
)
from dcp.testing.rank_processes import RankFailure, RankProcesses

__all__ = ["Build", "Finding", "ModelState", "OptimizerState", "PartOf", "Report", "Trial", "Whole", "check"]

Build: TypeAlias = Callable[[int, int], "tuple[nn.Module, torch.optim.Optimizer | None]"]
"""``build(rank, world)`` makes model and optimizer, in a process group of ``world`` ranks."""

_OPTIONS: Final = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer settings by parameter; groups list names on other pipeline stages."""

_MAX_LINES: Final = 4
_SEEDS_APART: Final = 1_000_003
_MAX_SEED: Final = 1 << 63

Finding: TypeAlias = StateFinding


Save: TypeAlias = Callable[..., Any]
"""A function called as `dcp.save` on all ranks. If the result has ``result()``, the state changes before that
call."""

Load: TypeAlias = Callable[..., Any]
"""Called as `dcp.load`, on all ranks: fills the state dict."""


@dataclass(frozen=True)
class ModelState:
    """The state's "model": a `Stateful` with fully qualified names, from torch's helpers. ``module`` is the
    model."""

    module: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by name."""
        return get_model_state_dict(self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values loaded into `state_dict`."""
        set_model_state_dict(self.module, state)


@dataclass(frozen=True)
class OptimizerState:
    """The state's "optimizer", as `ModelState`; the state of a new optimizer is created first."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return state by parameter name."""
        return get_optimizer_state_dict(self.module, self.optimizer, options=_OPTIONS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values loaded into `state_dict`."""
        set_optimizer_state_dict(self.module, self.optimizer, state, options=_OPTIONS)


def _whole(name: str, tensor: torch.Tensor, rank: int, world: int) -> None:
    """Treat all plain tensors as whole tensors."""


def check(
    build: Build,
    save: Save = dcp_save,
    load: Load = dcp_load,
    *,
    worlds: Sequence[int] = (2, 1, 3),
    only: str | Sequence[str] = "*",
    own: str | Sequence[str] = (),
    replicas: str | Sequence[str] = (),
    part_of: PartOf = _whole,
    folder: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 120.0,
    context: BaseContext | None = None,
) -> Report:
    """Save the state of ``build`` on ``worlds[0]`` ranks, and load on each of ``worlds``.

    Ranks are local processes in a gloo group; all have ended on return. A rank that raises, dies or hangs is
    a finding. Nothing is trained.

    Args:
        build: Module-level function that builds (model, optimizer) for ``(rank, world)``.
        save: `dcp.save`, `torch.distributed.checkpoint.save`, `dcp.async_save`, or a function with this
            signature. The state is {"model": `ModelState`, "optimizer": `OptimizerState`}.
        load: The matching load function.
        worlds: Numbers of ranks.
        only: Globs of parameters and buffers that a checkpoint must contain, such as "*.lora_*".
        own: Globs of plain tensors that belong to one rank each. Tensors that differ between ranks after
            ``build`` are recognized. During ``build``, torch's random numbers differ by rank, even after
            ``torch.manual_seed()``.
        replicas: Globs of tensors that are equal on all ranks only because of a common seed. Tensors that are
            equal after ``build`` are recognized and listed in the report.
        part_of: Module-level function that returns the `Whole` of a plain tensor, or None, for parallelism
            without `DTensor`.
        folder: Folder or URL for checkpoints; default: a temporary folder.
        timeout_seconds: Limit of each save and load, including ``build``.
        context: Start method of multiprocessing, default "spawn".

    Returns:
        The findings; ``assert report.ok, report`` prints them as a table.

    Raises:
        OptionError: A function cannot be pickled, ``worlds`` is empty, or a glob matches nothing.

    Examples:
        >>> report = check(build, worlds=(2, 1, 3))
        >>> assert report.ok, report
    """
    is_list = isinstance(worlds, Sequence) and len(worlds) > 0
    if not is_list or not all(isinstance(world, int) and world > 0 for world in worlds):
        raise OptionError(f"worlds must be a sequence of numbers of ranks such as (2, 1, 3), not {worlds!r}")
    asked = _Asked(build, part_of, _globs(only), _globs(own), _globs(replicas))
    with tempfile.TemporaryDirectory(prefix="dcp-conformance-") as made, RankProcesses(context) as ranks:
        root = made if folder is None else os.fspath(folder)
        saving = worlds[0]
        rows: list[Any] = ranks.run(saving, _save_on_rank, asked, save, root, timeout_seconds=timeout_seconds)
        if any(isinstance(row, RankFailure) for row in rows):
            return Report((Trial(saving, saving, findings=_failures("save", rows)),))
        tensors = {(one.part, one.name, one.rank): one for of_rank, *_ in rows for one in of_rank}
        saved = SavedState(len(rows), tensors, *map(frozenset, rows[0][1:]))
        _refuse_idle(asked, saved)
        trials = []
        for world in dict.fromkeys(worlds):
            found = ranks.run(world, _load_on_rank, asked, load, root, saved, timeout_seconds=timeout_seconds)
            good = [result for result in found if not isinstance(result, RankFailure)]
            findings = (*_failures("load", found), *(finding for _, own in good for finding in own))
            names = tuple(sorted(saved.own)), tuple(sorted(saved.replicas))
            count = sum(count for count, _ in good)
            trials.append(Trial(saved.world, world, count, names[0], findings, names[1]))
    return Report(tuple(trials))


@dataclass(frozen=True)
class _Asked:
    """The model to build on a rank, with globs of its tensors."""

    build: Build
    part_of: PartOf
    only: tuple[str, ...]
    own: tuple[str, ...]
    replicas: tuple[str, ...]

    def tensors(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int, world: int
    ) -> list[LiveTensor]:
        """List the tensors that match ``only``."""
        live = tensors_of(model, optimizer, self.part_of, rank, world)
        return [one for one in live if any(fnmatchcase(one.fqn, glob) for glob in self.only)]


def _globs(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _refuse_idle(asked: _Asked, saved: SavedState) -> None:
    """Raise OptionError for globs without a match, which would hide all findings."""
    names = {one.fqn for one in saved.tensors.values()}
    for what, globs in (("only", asked.only), ("own", asked.own), ("replicas", asked.replicas)):
        idle = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]
        if idle:
            raise OptionError(f"{what}: {', '.join(map(repr, idle))} match no parameter or buffer")


def _failures(what: str, results: Iterable[Any]) -> tuple[StateFinding, ...]:
    findings = []
    for result in results:
        if isinstance(result, RankFailure):
            lines = result.message.splitlines()  # first and last lines of a long message
            shown = " ".join(lines if len(lines) <= _MAX_LINES else [lines[0], "...", lines[-1]])
            findings.append(StateFinding("failed", result.rank, found=f"{what}: {shown}"))
    return tuple(findings)


# -- on a rank that saves ------------------------------------------------------------------------------------


def _save_on_rank(
    rank: int, world: int, asked: _Asked, save: Save, folder: str
) -> tuple[list[SavedTensor], set[str], set[str]]:
    with _random_by_rank(rank):
        model, optimizer = asked.build(rank, world)
    if optimizer is not None:
        get_optimizer_state_dict(model, optimizer)  # creates the state of a new optimizer
    live = asked.tensors(model, optimizer, rank, world)
    fqns, replicas = _own_names(live, asked)
    for moment in ("earlier", "saved"):
        _seed(live, moment, rank, fqns)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["lr"] = _rate(moment)
        pending = save(_state_of(model, optimizer), checkpoint_id=f"{folder}/{moment}")
        if hasattr(pending, "result"):
            _seed(live, "later", rank, fqns)
            pending.result()
    saved = [
        SavedTensor(one.name, one.fqn, one.part, one.shape, one.local.dtype, _owner(one, rank, fqns))
        for one in live
    ]
    return saved, fqns, replicas


@contextmanager
def _random_by_rank(rank: int) -> Iterator[None]:
    """Make torch's random numbers differ by rank in this block, even after ``torch.manual_seed()``."""
    seed = torch.manual_seed

    def seed_by_rank(number: int) -> torch.Generator:
        return seed((int(number) + rank * _SEEDS_APART) % _MAX_SEED)

    holders = (torch, torch.random)
    for holder in holders:
        setattr(holder, "manual_seed", seed_by_rank)  # noqa: B010 - mypy refuses to assign functions
    try:
        seed_by_rank(torch.initial_seed())
        yield
    finally:
        for holder in holders:
            setattr(holder, "manual_seed", seed)  # noqa: B010


def _owner(live: LiveTensor, rank: int, own: Iterable[str]) -> int | None:
    return rank if live.is_alone and live.fqn in own else None


def _own_names(live: Sequence[LiveTensor], asked: _Asked) -> tuple[set[str], set[str]]:
    """Return names of parameters and buffers that differ between ranks, and of equal ones."""
    rows = {
        (one.fqn, one.name, one.shape, hashlib.sha256(bits_of(one.local).tobytes()).hexdigest())
        for one in live
        if one.is_alone and one.part == "model"
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    kinds = Counter((fqn, name) for fqn, name, *_ in set().union(*gathered))
    holders = Counter(fqn for of_rank in gathered for fqn in {fqn for fqn, *_ in of_rank})
    named, alike = (
        {fqn for fqn in holders if any(fnmatchcase(fqn, glob) for glob in globs)}
        for globs in (asked.own, asked.replicas)
    )
    own = named | ({fqn for (fqn, _), count in kinds.items() if count > 1} - alike)
    return own, {fqn for fqn, count in holders.items() if count > 1} - own


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": ModelState(model)}
    return state if optimizer is None else state | {"optimizer": OptimizerState(model, optimizer)}


def _seed(live: Iterable[LiveTensor], moment: str, rank: int, own: Iterable[str]) -> None:
    for one in live:
        identity = Identity(one.name, _owner(one, rank, own), moment)
        write_bits(one.local, coded_bits(identity, one.index, one.local.dtype))


def _rate(moment: str) -> float:
    """Return the learning rate of all groups."""
    return number_of(Identity("lr", None, moment))


# -- on a rank that loads ------------------------------------------------------------------------------------


def _load_on_rank(
    rank: int, world: int, asked: _Asked, load: Load, folder: str, saved: SavedState
) -> tuple[int, list[StateFinding]]:
    model, optimizer = asked.build(rank, world)
    _seed(asked.tensors(model, optimizer, rank, world), "before", rank, saved.own)
    ties = _ties(model)
    load(_state_of(model, optimizer), checkpoint_id=f"{folder}/saved")
    live = asked.tensors(model, optimizer, rank, world)
    compared = [one for one in live if world == saved.world or not saved.is_own(one)]
    findings = [finding for one in compared for finding in judge(one, rank, saved)]
    findings += [*_lost_state(live, rank, world, saved), *_lost_rates(optimizer, rank)]
    findings += [
        StateFinding("untied", rank, "model", name, found=f"no longer the same tensor as {other}")
        for name, other in ties.items() - _ties(model).items()
    ]
    return len(compared), findings


def _lost_state(live: Sequence[LiveTensor], rank: int, world: int, saved: SavedState) -> list[StateFinding]:
    """Find saved optimizer state that is missing on this rank, for parameters with local elements."""
    here = {one.name for one in live if one.part == "optimizer"}
    fqns = {one.fqn for one in live if one.part == "model" and one.local.numel()}
    return [
        StateFinding("lost", rank, "optimizer", one.name, found="missing in the optimizer's state")
        for one in saved.tensors.values()
        if one.part == "optimizer" and one.fqn in fqns and one.name not in here
        if one.rank is None or (one.rank == rank and world == saved.world)
    ]


def _lost_rates(optimizer: torch.optim.Optimizer | None, rank: int) -> list[StateFinding]:
    rates = {group["lr"] for group in (optimizer.param_groups if optimizer is not None else ())}
    wrong = sorted(rate for rate in map(float, rates) if rate != _rate("saved"))
    return [StateFinding("lost", rank, "optimizer", "lr", found=f"it is {rate:g}") for rate in wrong]


def _ties(model: nn.Module) -> Mapping[str, str]:
    """Map further names of a parameter to its first name."""
    first = parameter_names(model)
    return {
        name: first[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[parameter] != name
    }
