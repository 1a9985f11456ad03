"""What integrations of trainers share: models and optimizers as `Stateful`, looks at the storage that all
ranks act upon, and errors that say what a framework lacks."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp.errors import CheckpointError, PlanError
from dcp.inspection.checkpoints import list_checkpoints
from dcp.ranks.collectives import Ranks
from dcp.ranks.exchanges import DEFAULT_TIMEOUT_SECONDS
from dcp.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

__all__ = [
    "TrainedModel",
    "TrainedOptimizers",
    "check_private",
    "committed_beside",
    "gathered",
    "has_shards",
    "on_first_rank",
    "own_part",
    "package_of",
    "refused_by_all",
]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What compilation and activation checkpointing put into names of parameters."""


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """All of a model's state; with PEFT adapters, all of them whole and what else is not frozen, alone.

    Names do not depend on compilation or FSDP; ``model`` has no DDP around it. Tensors are the model's own.
    With ``saving`` it is what this rank has to save: see `own_part`.
    """

    model: nn.Module
    saving: bool = False

    def state_dict(self) -> dict[str, Any]:
        """By name."""
        state: dict[str, Any] = get_model_state_dict(self.model)
        if self.saving:
            state = own_part(self.model, state)
        modules = self.model.modules()
        adapters = {name for module in modules for name in getattr(module, "peft_config", None) or ()}
        if not adapters:
            return state
        # Tied weights are there under each of their names.
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = {_plain(name) for name, parameter in named if not parameter.requires_grad}
        return {
            name: value
            for name, value in state.items()
            if name not in frozen or adapters & {*name.split(".")}
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What is left out stays as it is."""
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


@dataclass(frozen=True, eq=False)
class TrainedOptimizers:
    """The optimizers of a model, in the form of torch's `get_optimizer_state_dict`.

    That function makes a step with an optimizer that has none of its state yet. Here it stays as it is: a
    save has what there is, and `dcp.load` fills what the checkpoint has, so that parameters which were never
    used stay without state.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]

    def state_dict(self) -> dict[str, Any]:
        """By the names of parameters. Raises PlanError where an optimizer has one that the model has not."""
        state, groups = dict[str, Any](), list[Any]()
        for optimizer, named in self._named():
            own, names = optimizer.state_dict(), list(chain(*named))
            state |= {names[number]: value for number, value in own["state"].items()}
            pairs = zip(own["param_groups"], named, strict=True)
            groups += [group | {"params": list(parameters)} for group, parameters in pairs]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it. Raises PlanError where the parameters are in other groups."""
        saved = {frozenset(group["params"]): group for group in state_dict["param_groups"]}
        for optimizer, named in self._named():
            numbers = {name: number for number, name in enumerate(chain(*named))}
            if any(frozenset(parameters) not in saved for parameters in named):
                raise PlanError("the checkpoint's optimizers have other groups of parameters")
            groups = [
                saved[frozenset(parameters)] | {"params": [numbers[name] for name in parameters]}
                for parameters in named
            ]
            state = {numbers[name]: value for name, value in state_dict["state"].items() if name in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _named(self) -> list[tuple[Optimizer, list[list[str]]]]:
        """Each with the names of its parameters by group, in the order in which it numbers them."""
        names = {parameter: _plain(name) for name, parameter in self.model.named_parameters()}
        found = []
        for optimizer in self.optimizers:
            groups = [group["params"] for group in optimizer.param_groups]
            if any(parameter not in names for parameter in chain(*groups)):
                raise PlanError(
                    f"{type(optimizer).__name__} has parameters that are none of the model's, so there are "
                    "no names to save them by: make their module a part of the model, or prepare it as well"
                )
            found.append((optimizer, [[names[parameter] for parameter in group] for group in groups]))
        return found


def own_part(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The part of ``state`` that this rank has to save: buffers that are whole are rank 0's, whose values
    go on in DDP, too; the running means of batch norms differ by rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return state
    buffers = {_plain(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in state.items() if name not in buffers or isinstance(value, DTensor)}


@dataclass(frozen=True)
class _RefusedState:
    error: Exception

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise self.error


@contextmanager
def refused_by_all(use: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Around what makes the state that all ranks ``use`` next, in a save or load of theirs: what is raised on
    one rank fails that on the others, too, who would wait for the rank."""
    try:
        yield
    except Exception as error:
        if dist.is_available() and dist.is_initialized():
            with suppress(CheckpointError):
                use({"refused": _RefusedState(error)})
        raise


def has_shards(value: Any) -> bool:
    """Whether there is a DTensor in it, in dicts, lists and tuples however deep."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(has_shards, value))
    return isinstance(value, DTensor)


def on_first_rank(look: Callable[[], Any]) -> Any:
    """What ``look`` finds on rank 0, on all ranks; plain data. Its error is raised on all, too."""
    packed = _ranks().broadcast("look", lambda: bytes(msgpack.packb(look())))
    return msgpack.unpackb(packed)


def gathered(own: Any) -> list[Any]:
    """What each rank has, of whatever classes; what cannot be pickled on one of them is raised on all."""

    def packed() -> bytes:
        file = io.BytesIO()
        torch.save(own, file)  # pickle itself has no way for some tensors
        return file.getvalue()

    states = _ranks().all_gather("gather", packed)
    return [torch.load(io.BytesIO(state), weights_only=False) for state in states]


def _ranks() -> Ranks:
    together = dist.is_available() and dist.is_initialized()
    return Ranks(None, use_dist=together, timeout_seconds=DEFAULT_TIMEOUT_SECONDS, operation="load")


def committed_beside(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """The other committed checkpoints in the folder of ``place``, newest first."""
    folder, name = os.path.split(os.fspath(place))
    listed = list_checkpoints(folder or ".", storage_options=storage_options)
    whole = [each for each in listed if each.state == "committed" and each.name != name]
    whole.sort(key=lambda each: each.committed_seconds or 0.0, reverse=True)
    return [os.path.join(folder, each.name) for each in whole]  # noqa: PTH118 - may be a URL


@contextmanager
def package_of(extra: str) -> Iterator[None]:
    """Around a framework's imports: where a package is missing, say what brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        advice = f"this needs {error.name}: pip install 'dcphub[{extra}]'"
        raise ModuleNotFoundError(advice, name=error.name) from error


def check_private(package: str, holder: Any, names: Iterable[str] | Mapping[str, tuple[str, ...]]) -> None:
    """Raise RuntimeError where ``holder`` has not the private ``names``, or methods with other parameters."""
    parameters = names if isinstance(names, Mapping) else {}
    for name in names:
        there = getattr(holder, name, None)
        wanted = parameters.get(name)
        if there is None or (wanted and tuple(inspect.signature(there).parameters) != wanted):
            raise RuntimeError(
                f"{package} {version(package)} has no {name}{wanted or ''}, which dcp needs; "
                "docs/trainers.md has the version that was tried"
            )


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
