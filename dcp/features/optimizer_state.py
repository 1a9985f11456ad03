"""State of new optimizers to load into.

Like torch's state dict helpers (`torch.distributed.checkpoint.state_dict._init_optim_state`), this module
runs a step with zero gradients and learning rates. Parameters, gradients, groups, hooks and the optimizer's
state are restored afterwards; only the state dict keeps the new state. If the step fails, as for LBFGS, the
state is created in the stored form.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp.features.entries import optimizer_dicts
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.tensors import torch_dtype
from dcp.storage.torch_compat import preserved_versions

logger = logging.getLogger(__name__)

_DEPTH = 3
_LOOKED_AT = 64
"""Largest list or dict searched for optimizers."""
_NOT_LOOKED_THROUGH = (torch.Tensor, torch.nn.Module, type, ModuleType)


def optimizers_without_state(holder: Any) -> list[Optimizer]:
    """Return optimizers without state that ``holder`` is, or has as attributes; wrapped optimizers come
    first."""
    found: dict[int, Optimizer] = {}
    _collect(holder, _DEPTH, found, set())
    return [optimizer for optimizer in found.values() if _without_state(optimizer)]


def state_dict_with_state(
    stateful: Any,
    without: Mapping[str, Any],
    optimizers: list[Optimizer],
    key: str,
    is_stored: Callable[[str, Any], bool],
    index: CheckpointIndex,
) -> dict[str, Any]:
    """Return ``stateful.state_dict()`` while ``optimizers`` have state for all parameters.

    ``without`` is the state dict before. Additional entries are kept only if ``is_stored(name, entry)`` finds
    the flat name (below ``key``) in the checkpoint. If the step fails, the state follows the checkpoint's
    index, unless parameters are sharded.
    """
    failed: list[tuple[Optimizer, Exception]] = []
    with ExitStack() as made:
        for optimizer in optimizers:
            try:
                made.enter_context(_with_state(optimizer))
            except Exception as error:  # noqa: BLE001 - a step of any optimizer; what is lost by it is an error later
                failed.append((optimizer, error))
        state = stateful.state_dict()
    pruned: dict[str, Any] = _pruned(state, without, key, is_stored)
    for optimizer, failure in failed:
        if any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
            logger.warning(
                "%r: %s has no state yet, and a step to initialize the state failed: %s: %s",
                key,
                type(optimizer).__name__,
                type(failure).__name__,
                failure,
            )
            return pruned
    if failed:
        _add_stored_state(pruned, f"{key}.", index, is_stored)
    return pruned


def _add_stored_state(
    state: Mapping[str, Any], prefix: str, index: CheckpointIndex, is_stored: Callable[[str, Any], bool]
) -> None:
    """Add parameter state of the stored form to optimizer state dicts in ``state``."""

    def place_for(name: str) -> Any:
        row = index.position.get(name)
        if row is None:
            return None
        return torch.empty(index.shape(row), dtype=torch_dtype(int(index.dtype_codes[row])), device="cpu")

    paths = index.planner_data if isinstance(index.planner_data, Mapping) else {}
    for begin, optimizer in optimizer_dicts(state, prefix):
        own_state, groups = optimizer["state"], optimizer["param_groups"]
        if not isinstance(own_state, dict):
            continue
        parameters = [each for group in groups for each in group.get("params", ())]
        lacking = {f"{begin}state.{each}": each for each in parameters if not own_state.get(each)}
        found: dict[Any, dict[str, Path]] = {}
        for name, path in paths.items():
            for depth in range(1, len(path) if isinstance(path, tuple) else 0):
                above = ".".join(map(str, path[:depth]))
                if above in lacking and is_stored(name, None):
                    found.setdefault(lacking[above], {})[name] = path[depth:]
        for parameter, own in found.items():
            own_state[parameter] = restore_structure(None, own, place_for)


def _collect(holder: Any, depth: int, found: dict[int, Optimizer], seen: set[int]) -> None:
    if depth < 0 or id(holder) in seen or isinstance(holder, _NOT_LOOKED_THROUGH):
        return
    seen.add(id(holder))
    values: Iterable[Any]
    if isinstance(holder, Mapping):
        values = holder.values()
    elif isinstance(holder, list | tuple):
        values = holder
    else:
        attributes = getattr(holder, "__dict__", {})
        # these attributes contain many parameters and no optimizers
        own = {"state", "param_groups", "defaults"} if isinstance(holder, Optimizer) else set()
        values = [value for name, value in list(attributes.items()) if name not in own]
    for inner in list(islice(values, _LOOKED_AT)):
        if isinstance(inner, Mapping | list | tuple) or hasattr(inner, "__dict__"):
            _collect(inner, depth - 1, found, seen)
    if isinstance(holder, Optimizer) and {"state", "param_groups"} <= vars(holder).keys():
        found[id(holder)] = holder


def _without_state(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return trainable parameters without state."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]


@contextmanager
def _with_state(optimizer: Optimizer) -> Iterator[None]:
    """Yield the optimizer with state for all parameters, as after a first step."""
    parameters = _without_state(optimizer)
    state = optimizer.state
    known = set(state)
    # create the state outside of the caller's inference mode, otherwise it could not be trained
    inference = any(parameter.is_inference() for parameter in parameters)
    try:
        with torch.inference_mode(inference):
            _step(optimizer, parameters)
        yield
    finally:
        for owner in [owner for owner in state if owner not in known]:
            del state[owner]


def _step(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """Run a step for ``parameters`` with zero gradients, which only creates the state."""
    chosen = set(map(id, parameters))
    attributes = dict(vars(optimizer))
    gradients = [parameter.grad for parameter in parameters]
    # weight decay, or a zero denominator, can change a parameter despite zero gradient and rate
    values = [parameter.detach().clone() for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        vars(optimizer).update(
            param_groups=[_stand_in(group, chosen) for group in optimizer.param_groups],
            _optimizer_step_pre_hooks=OrderedDict(),
            _optimizer_step_post_hooks=OrderedDict(),
        )
        counted = tuple(parameter for parameter in parameters if not parameter.is_inference())
        with preserved_versions(counted):
            try:
                train = getattr(optimizer, "train", None)
                if callable(train):  # schedulefree optimizers step in train mode only
                    train()
                # The unwrapped method: schedulers and profilers count calls of step().
                step = type(optimizer).step
                step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
                step(optimizer)
            finally:
                with torch.no_grad():
                    for parameter, value in zip(parameters, values, strict=True):
                        parameter.copy_(value)
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _stand_in(group: dict[str, Any], chosen: set[int]) -> dict[str, Any]:
    """Return a copy of a parameter group with zero learning rate."""
    made: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor):
            made[name] = value.detach().clone()
        else:
            made[name] = copy.copy(value) if isinstance(value, list | dict) else value
    made["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
    if "lr" in group:
        made["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    return made


def _pruned(state: Any, without: Any, name: str, is_stored: Callable[[str, Any], bool]) -> Any:
    """Remove entries of ``state`` that neither ``without`` nor the checkpoint has."""
    if isinstance(state, Mapping) and isinstance(without, Mapping):
        kept = {
            key: _pruned(value, without[key], f"{name}.{key}", is_stored) if key in without else value
            for key, value in state.items()
            if key in without or is_stored(f"{name}.{key}", value)
        }
        if len(kept) == len(state) and all(kept[key] is state[key] for key in kept):
            return state
        made = copy.copy(state)
        for key in state:
            if key not in kept:
                del made[key]  # type: ignore[attr-defined]
            else:
                made[key] = kept[key]  # type: ignore[index]
        return made
    if type(state) is list and type(without) is list and len(state) == len(without):
        pairs = zip(state, without, strict=True)
        return [_pruned(*pair, f"{name}.{number}", is_stored) for number, pair in enumerate(pairs)]
    return state
