"""Shared parts of trainer plug-ins: models and optimizers as `Stateful`, exchanges between ranks, saves to
trainer paths, and errors for missing packages.
"""

from __future__ import annotations

import inspect
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from types import SimpleNamespace
from typing import Any, get_args

import msgpack
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp.background.writers import SaveFuture, raise_error
from dcp.errors import CheckpointError, OptionError, PlanError
from dcp.inspection.checkpoints import list_checkpoints
from dcp.manager.catalog import CatalogRegistration, Registrar, registration_of
from dcp.manager.removal import remove_checkpoint
from dcp.manager.saving import Mode
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from dcp.state_dict_saver import AsyncCheckpointerType, async_save, save
from dcp.storage.stores.opening import OpenWith

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Wrapper names that compilation and activation checkpointing put into parameter names."""


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """State of a model; with PEFT, only adapters and other trained parameters.

    Names do not depend on compilation or FSDP; ``model`` has no DDP wrapper. Tensors are the model's own.
    ``saving`` omits values that other ranks save: see `own_part`.
    """

    model: nn.Module
    saving: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by name."""
        state: dict[str, Any] = get_model_state_dict(self.model)
        if self.saving:
            state = own_part(self.model, state)
        modules = self.model.modules()
        adapters = {name for module in modules for name in getattr(module, "peft_config", None) or ()}
        if not adapters:
            return state
        # Tied weights are listed under each of their names.
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = {_plain(name) for name, parameter in named if not parameter.requires_grad}
        return {
            name: value
            for name, value in state.items()
            if name not in frozen or adapters & {*name.split(".")}
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the given tensors; others stay unchanged."""
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


@dataclass(frozen=True, eq=False)
class TrainedOptimizers:
    """Optimizers of a model, in the form of torch's `get_optimizer_state_dict`.

    torch's function runs a step for an optimizer without state. This class does not: `dcp.load` fills
    stored state only, and unused parameters stay without state.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter names. Raises PlanError for parameters outside of the model."""
        state, groups = dict[str, Any](), list[Any]()
        for optimizer, named in self._named():
            own, names = optimizer.state_dict(), list(chain(*named))
            state |= {names[number]: value for number, value in own["state"].items()}
            pairs = zip(own["param_groups"], named, strict=True)
            groups += [group | {"params": list(parameters)} for group, parameters in pairs]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state. Raises PlanError if parameter groups differ."""
        saved = {frozenset(group["params"]): group for group in state_dict["param_groups"]}
        for optimizer, named in self._named():
            numbers = {name: number for number, name in enumerate(chain(*named))}
            if any(frozenset(parameters) not in saved for parameters in named):
                raise PlanError("the optimizers have other parameter groups than those in the checkpoint")
            groups = [
                saved[frozenset(parameters)] | {"params": [numbers[name] for name in parameters]}
                for parameters in named
            ]
            state = {numbers[name]: value for name, value in state_dict["state"].items() if name in numbers}
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _named(self) -> list[tuple[Optimizer, list[list[str]]]]:
        """Return each optimizer with parameter names by group, in order."""
        names = {parameter: _plain(name) for name, parameter in self.model.named_parameters()}
        found = []
        for optimizer in self.optimizers:
            groups = [group["params"] for group in optimizer.param_groups]
            if any(parameter not in names for parameter in chain(*groups)):
                raise PlanError(
                    f"{type(optimizer).__name__} has parameters outside of the model, which have no names "
                    "to save them under: make their module a submodule of the model, or pass it to prepare()"
                )
            found.append((optimizer, [[names[parameter] for parameter in group] for group in groups]))
        return found


def own_part(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` without values saved by rank 0: whole buffers such as running means."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return state
    buffers = {_plain(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in state.items() if name not in buffers or isinstance(value, DTensor)}


@contextmanager
def refused_by_all(use: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Fail the next collective ``use`` on all ranks if a rank raises in this block, which creates the
    state.
    """
    try:
        yield
    except Exception as error:
        if dist.is_available() and dist.is_initialized():
            refuse = partial(raise_error, error)
            with suppress(CheckpointError):
                use({"refused": SimpleNamespace(state_dict=refuse, load_state_dict=refuse)})
        raise


def has_shards(value: Any) -> bool:
    """Return True if ``value`` contains a DTensor in nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(has_shards, value))
    return isinstance(value, DTensor)


def on_first_rank(look: Callable[[], Any]) -> Any:
    """Call ``look`` on rank 0, and return its plain data or raise its error on all ranks."""
    packed = _ranks().broadcast("look", lambda: bytes(msgpack.packb(look())))
    return msgpack.unpackb(packed)


def gathered(own: Any) -> list[Any]:
    """Return the values of all ranks; an error in pickling is raised on all ranks."""

    def packed() -> bytes:
        file = io.BytesIO()
        torch.save(own, file)  # pickle alone cannot encode some tensors
        return file.getvalue()

    states = _ranks().all_gather("gather", packed)
    return [torch.load(io.BytesIO(state), weights_only=False) for state in states]


def _ranks() -> Ranks:
    together = dist.is_available() and dist.is_initialized()
    return Ranks(None, use_dist=together, timeout_seconds=DEFAULT_TIMEOUT_SECONDS, operation="load")


def committed_beside(
    place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the other committed checkpoints in the folder of ``place``, newest first."""
    folder, name = os.path.split(os.fspath(place))
    listed = list_checkpoints(folder or ".", storage_options=storage_options)
    itself = os.path.basename(os.path.abspath(folder))  # noqa: PTH100, PTH119 - may be a URL
    whole = [each for each in listed if each.state == "committed" and each.name not in (name, itself)]
    whole.sort(key=lambda each: each.committed_seconds or 0.0, reverse=True)
    return [os.path.join(folder, each.name) for each in whole]  # noqa: PTH118 - may be a URL


@contextmanager
def package_of(extra: str, needs: str = "", *, own_only: bool = False) -> Iterator[None]:
    """Name the extra to install if an import in this block fails.

    ``needs`` lists required versions, and missing names then count too. ``own_only`` ignores failures of
    the framework's own dependencies, such as triton.
    """
    try:
        yield
    except ImportError as error:
        is_missing = needs or isinstance(error, ModuleNotFoundError)
        if not is_missing or (own_only and not str(error.name).startswith(extra)):
            raise
        advice = f"{needs or error.name} is required ({error}): pip install 'dcphub[{extra}]'"
        raise ModuleNotFoundError(advice, name=error.name) from error


def check_private(package: str, holder: Any, names: Iterable[str] | Mapping[str, tuple[str, ...]]) -> None:
    """Raise RuntimeError if ``holder`` lacks one of the private ``names``, or parameters differ."""
    parameters = names if isinstance(names, Mapping) else {}
    for name in names:
        there = getattr(holder, name, None)
        wanted = parameters.get(name)
        if there is None or (wanted and tuple(inspect.signature(there).parameters) != wanted):
            raise RuntimeError(
                f"{package} {version(package)} has no {name}{wanted or ''}, which dcp needs; "
                "docs/how-to/use-a-trainer.md lists the tested version"
            )


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# -- saves to paths that a trainer chooses -------------------------------------------------------------------


_AFTER_ERROR_SECONDS = 60.0
"""Wait for a pending save after a training exception, because other ranks may be dead."""


class PathSaves:
    """Saves of a training run: from one process with ``no_dist``, else by all ranks with equal calls,
    except `remove`.

    ``catalog`` is as for `CheckpointManager`; the run is the parent folder of a path.

    Raises:
        OptionError: For an unknown ``mode``.
        ModuleNotFoundError: If ``catalog`` needs httpx; with several ranks raised by `agree`.
    """

    def __init__(
        self,
        mode: Mode = "thread",
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | CatalogRegistration | None = None,
        *,
        no_dist: bool,
    ) -> None:
        if mode not in get_args(Mode):
            raise OptionError(f"mode must be 'thread', 'process' or 'sync', not {mode!r}")
        self.storage_options = storage_options
        self._mode = mode
        self._no_dist = no_dist
        self._asked = CatalogRegistration(catalog) if isinstance(catalog, str) else catalog
        # with several ranks `agree` does so, when ranks can communicate
        self._catalog = registration_of(self._asked) if no_dist else None
        self._timeout_seconds: float | None = None
        # Held during a deletion: a save to the same path waits.
        self._changed = threading.Condition()
        self._pending: list[SaveFuture] = []
        self._to_remove: list[str] = []
        self._failures: list[BaseException] = []
        self._registrars: dict[str, Registrar] = {}
        self._is_first = no_dist

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options without the saves, for trainers that pickle plug-ins to start ranks."""
        options = self._mode, self.storage_options, self._asked
        return partial(PathSaves, no_dist=self._no_dist), options

    def agree(self) -> None:
        """Raise ModuleNotFoundError on all ranks if one lacks a package for ``catalog``."""

        def own() -> bytes:
            self._catalog = registration_of(self._asked)
            return b""

        Ranks(use_dist=True, operation="save").all_gather("catalog", own)

    def begin(self, state: dict[str, Any], path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """Save ``state``; return when it may change. Raises the error of an earlier save."""
        self._timeout_seconds = None
        if not self._no_dist:
            self.wait()  # a failure is known to all ranks only after the wait
        self._raise_failure()
        self._is_first = self._no_dist or dist.get_rank() == 0
        name = os.fspath(path)
        if self._no_dist and os.path.isfile(name):  # noqa: PTH113 - may be a URL
            raise OptionError(f"{name} is a file, but a checkpoint is a folder: choose another path")
        with self._changed:
            self._to_remove = [each for each in self._to_remove if each != name]
            if self._is_first and os.path.islink(name):  # noqa: PTH114 - may be a URL
                os.unlink(name)  # noqa: PTH108 - what it names is a checkpoint of its own
        options: dict[str, Any] = {
            "checkpoint_id": name,
            "no_dist": self._no_dist,
            "user_metadata": {} if step is None else {"step": step},
            "storage_options": self.storage_options,
        }
        if self._mode == "sync":
            save(state, **options)
            if self._is_first:
                self._note(name, step)
            return
        future = async_save(state, async_checkpointer_type=AsyncCheckpointerType(self._mode), **options)
        with self._changed:
            self._pending.append(future)
        # called at once if the save has already ended
        future.add_done_callback(partial(self._ended, name, step, future))

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint after pending saves; keep it if one failed."""
        with self._changed:
            if self._failures:
                return
            self._to_remove.append(os.fspath(path))
            self._remove_if_committed()

    def wait(self) -> None:
        """Wait for all saves and deletions; raise the first error."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending, self._timeout_seconds):
                for future in self._pending:
                    future.abort()
        self._raise_failure()

    def close(self) -> None:
        """Wait like `wait`, and some seconds for reports to the catalog."""
        try:
            self.wait()
        finally:
            with self._changed:
                registrars, self._registrars = self._registrars, {}
            for registrar in registrars.values():
                registrar.close()

    def hurry(self) -> None:
        """Shorten waits until the next save, because training ended with an exception."""
        self._timeout_seconds = _AFTER_ERROR_SECONDS

    def _ended(self, path: str, step: int | None, future: SaveFuture, _: Future[Any]) -> None:
        """Handle the end of a save, in its thread."""
        error = future.exception()
        with self._changed:
            self._pending = [each for each in self._pending if each is not future]
            self._changed.notify_all()
            if error is not None:
                self._failures.append(error)
                self._to_remove.clear()  # the checkpoint to be replaced is still the newest
            elif self._is_first:
                self._note(path, step)
            self._remove_if_committed()

    def _note(self, path: str, step: int | None, *, deleted: bool = False) -> None:
        """Report to the catalog that ``path`` was saved or deleted."""
        if self._catalog is not None:
            folder, name = os.path.split(path)
            url = OpenWith(self.storage_options)(folder or ".").url
            if url not in self._registrars:
                self._registrars[url] = Registrar(self._catalog, url)
            self._registrars[url].tell(name, step, deleted=deleted)

    def _remove_if_committed(self) -> None:
        if self._pending:
            return
        while self._to_remove:
            path = self._to_remove.pop()
            try:
                if os.path.islink(path) or os.path.isfile(path):  # noqa: PTH113, PTH114 - may be a URL
                    os.unlink(path)  # noqa: PTH108
                else:
                    remove_checkpoint(OpenWith(self.storage_options)(path), time.time())
                self._note(path, None, deleted=True)
            except (CheckpointError, OSError) as error:
                self._failures.append(error)

    def _raise_failure(self) -> None:
        with self._changed:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]
