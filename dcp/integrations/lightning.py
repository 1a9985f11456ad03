"""Lightning: save and resume through dcp by a plug-in, a strategy and a callback.

See docs/how-to/use-a-trainer.md. ModelCheckpoint decides when to save and what to keep; a checkpoint is a
folder with its name.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import getitem
from typing import Any, Final

import torch

from dcp.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError, UnsafeObjectError
from dcp.integrations import trainer_state as shared
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import PathSaves
from dcp.manager.catalog import CatalogRegistration
from dcp.manager.saving import Mode
from dcp.planners.load.selection import LoadKeywords
from dcp.planners.per_rank import PerRank
from dcp.ranks.failures import causes_of
from dcp.state_dict import get_model_state_dict, set_model_state_dict
from dcp.state_dict_loader import load, read
from dcp.storage.formats.container_notes import NO_PLAIN_KEY, plain_key

with shared.package_of("lightning"):
    import lightning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn

# Undocumented names in Lightning's files and folders; a test compares them with Lightning:
LAST: Final = "last"  # prefix of names that ``ckpt_path="last"`` finds
BEFORE_REQUEUE: Final = "hpc_ckpt_"  # prefix of checkpoints written right before SLURM ends the job
VERSION: Final = "pytorch-lightning_version"  # a key of every checkpoint
SHARDS: Final = "meta.pt"  # the file that marks Lightning's sharded checkpoints

_BYPASSED: Final = (
    "ModelParallelStrategy and FSDPStrategy never ask a CheckpointIO for sharded checkpoints: "
    "DcpCheckpointIO does nothing here. Use Trainer(strategy=DcpModelParallelStrategy(...)) instead"
)
_FORM: Final = "dcp_form"  # key of a record of containers other than dict and list
_Path = str | os.PathLike[str]
_State = dict[str, Any]


class DcpCheckpointIO(CheckpointIO):
    """Checkpoint plug-in for one process and DDP: folders written in the background, committed atomically
    and verified on load.

    All values that Lightning saves are restored, on the CPU. Checkpoints replaced by ModelCheckpoint are
    deleted after the newer commit. ``ckpt_path="last"`` skips damaged checkpoints for the newest valid
    neighbor. Lightning's own files load too.

    Args:
        mode: "thread" and "process" copy the state and write in the background; "sync" writes before
            training continues.
        storage_options: As for `dcp.save`.
        catalog: As for `dcp.CheckpointManager`.

    Raises:
        OptionError: For wrong values.
        ModuleNotFoundError: If ``catalog`` needs httpx.

    Examples:
        saves = ModelCheckpoint(save_last=True)
        trainer = Trainer(plugins=[DcpCheckpointIO()], callbacks=[RankStates(), saves])
        trainer.fit(module, ckpt_path="last")
    """

    def __init__(
        self,
        *,
        mode: Mode = "thread",
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | CatalogRegistration | None = None,
    ) -> None:
        self._saves = PathSaves(mode, storage_options, catalog, no_dist=True)

    def save_checkpoint(self, checkpoint: _State, path: _Path, storage_options: Any | None = None) -> None:
        """Save a nested dict on the calling rank; return after the copy.

        Raises:
            OptionError: If the path is a file, or for ``storage_options``.
            CheckpointError: If an earlier save failed.
        """
        _take_none(storage_options)
        _begin(self._saves, _sealed(checkpoint), path, checkpoint)

    def load_checkpoint(
        self, path: _Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> _State:
        """Load a checkpoint or a file of Lightning to ``map_location``; all ranks must call with equal
        arguments.

        ``weights_only=False`` allows values of any class, whose pickles may run code.

        Raises:
            CheckpointNotFoundError: If nothing is committed.
            CorruptCheckpointError: If bytes are damaged.
            UnsafeObjectError: If an object needs ``weights_only=False``.
        """
        device: Any = "cpu" if map_location is None else map_location
        if _is_of_lightning(path):
            return TorchCheckpointIO().load_checkpoint(os.fspath(path), device, weights_only)
        if not isinstance(device, str | torch.device):
            raise OptionError(f"map_location must be a device, not {device!r}")
        self.wait()
        options = self._saves.storage_options
        whole = partial(read, device=device, weights_only=weights_only, storage_options=options)
        return _newest_good(path, lambda path: _opened(whole(path)), options)

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete a checkpoint after all earlier saves are committed; keep it if one failed."""
        if os.path.isdir(path) and _is_of_lightning(path):  # noqa: PTH112 - may be a URL
            rank_zero_warn(_BYPASSED)
            TorchCheckpointIO().remove_checkpoint(os.fspath(path))
        else:
            self._saves.remove(path)

    def wait(self) -> None:
        """Wait until all saves are committed; raise the error of a failed save."""
        self._saves.wait()

    def teardown(self) -> None:
        """Wait at the end of the Trainer's work."""
        self._saves.close()


class DcpStrategyMixin:
    """Mixin for a strategy with DTensors, as first base: each rank saves its shards and loads its parts on
    any number of ranks.

    Values outside of model and optimizers are rank 0's.

    Args:
        *args: Arguments of the strategy.
        **kwargs: Arguments of the strategy, and ``mode``, ``storage_options`` and ``catalog`` of
            `DcpCheckpointIO`.

    Raises:
        OptionError: For ``save_distributed_checkpoint=False``, which requests a single file.
        ModuleNotFoundError: If ``catalog`` needs httpx.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in ("mode", "storage_options", "catalog") if name in kwargs}
        if not kwargs.get("save_distributed_checkpoint", True):
            raise OptionError(
                f"{type(self).__name__} saves sharded checkpoints only: omit "
                "save_distributed_checkpoint=False; `dcp convert` writes a single file"
            )
        super().__init__(*args, **kwargs)
        self._saves = PathSaves(**own, no_dist=False)

    def setup_environment(self: Any) -> None:
        """Set up the strategy. Raises ModuleNotFoundError on all ranks if one lacks httpx for ``catalog``."""
        super().setup_environment()  # type: ignore[misc]
        self._saves.agree()

    def lightning_module_state_dict(self: Any) -> _State:
        """Return the model's sharded state without a copy; the save copies it."""
        return get_model_state_dict(self.model)

    def optimizer_state(self: Any, optimizer: Any) -> _State:
        """Return an optimizer's state by parameter names without a copy."""
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return shared.TrainedOptimizers(self.model, [own]).state_dict()

    def save_checkpoint(
        self: Any, checkpoint: _State, filepath: _Path, storage_options: Any | None = None
    ) -> None:
        """Save like `DcpCheckpointIO.save_checkpoint`, on all ranks.

        Raises:
            OptionError: For a DTensor outside of the model's and optimizers' state.
        """
        path = self.broadcast(filepath)
        with shared.refused_by_all(partial(self._saves.begin, path=path)):
            _take_none(storage_options)
            state = self._to_save(checkpoint)
        _begin(self._saves, state, path, checkpoint)

    def _to_save(self: Any, checkpoint: _State) -> _State:
        """Return this rank's part of a checkpoint."""
        rest = dict(checkpoint)
        state = {"state_dict": shared.own_part(self.model, rest.pop("state_dict"))}
        for number, optimizer_state in enumerate(rest.pop("optimizer_states", ())):
            state[f"optimizer_{number}"] = optimizer_state
        for name, value in rest.items():
            if shared.has_shards(value):
                raise OptionError(
                    f"checkpoint[{name!r}] has a DTensor outside of model and optimizer state: move it "
                    "there, or save its full_tensor()"
                )
        return state | {"rest": _sealed(rest)} if self.is_global_zero else state

    def load_checkpoint(self: Any, checkpoint_path: _Path, weights_only: bool | None = None) -> _State:
        """Fill model and optimizers on all ranks; return the rest of the checkpoint.

        Raises:
            MissingKeyError: If the checkpoint lacks entries.
            CheckpointError: Errors of `DcpCheckpointIO.load_checkpoint` and `dcp.load`.
        """
        path = self.broadcast(checkpoint_path)
        if _is_of_lightning(path):
            return dict(super().load_checkpoint(path, weights_only))  # type: ignore[misc]
        self._saves.wait()
        options = self._saves.storage_options

        def fill(path: _Path) -> _State:
            rest = read(path, only="rest", weights_only=weights_only, storage_options=options)["rest"]
            self._fill({"checkpoint_id": path, "storage_options": options})
            return _opened(rest)

        return _newest_good(path, fill, options)

    def _fill(self: Any, options: _State) -> None:
        strict = self.lightning_module.strict_loading
        lenient: LoadKeywords = {} if strict else {"allow_partial_load": True, "unexpected": "ignore"}
        model = {"state_dict": get_model_state_dict(self.model)}
        load(model, **options, **lenient)
        set_model_state_dict(self.model, model["state_dict"])
        if self.optimizers:
            states = [shared.TrainedOptimizers(self.model, [optimizer]) for optimizer in self.optimizers]
            load({f"optimizer_{number}": state for number, state in enumerate(states)}, **options)

    def remove_checkpoint(self: Any, filepath: _Path) -> None:
        """Remove as `DcpCheckpointIO.remove_checkpoint`."""
        if self.is_global_zero:
            self._saves.remove(filepath)

    def on_exception(self: Any, exception: BaseException) -> None:
        """Shorten the wait for pending saves, because other ranks may have ended."""
        self._saves.hurry()
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self: Any) -> None:
        """Wait for pending saves."""
        self._saves.close()
        super().teardown()  # type: ignore[misc]


class DcpModelParallelStrategy(DcpStrategyMixin, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) with `DcpStrategyMixin`."""


class RankStates(Callback):
    """Callback that saves random generators and stateful data loaders of every rank.

    Lightning saves no generators, and loader positions of rank 0 only. On another number of ranks
    generators keep their state and loops are rank 0's, with a warning. A resume within an epoch sees the
    same data only if the loader has state and determines the order, see docs/how-to/use-a-trainer.md;
    ``shuffle=True`` does not, and saves warn.
    """

    _resumed: _State | None = None
    _has_warned = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise OptionError for a `DcpCheckpointIO` that the strategy ignores."""
        strategy = trainer.strategy
        asks = isinstance(strategy, DcpStrategyMixin) or not isinstance(strategy, ModelParallelStrategy)
        if not asks and isinstance(strategy.checkpoint_io, DcpCheckpointIO):
            raise OptionError(_BYPASSED)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: _State) -> None:
        """Gather the states of all ranks."""
        if not (self._has_warned or trainer.is_last_batch) and _is_shuffled(trainer):
            self._has_warned = True
            rank_zero_warn(
                "the checkpoint was saved within an epoch of a data loader with shuffle=True, and does not "
                "contain the order of samples: a resumed run may see other samples. Pass StatefulDataLoader("
                "sampler=dcp.integrations.torchdata.RescalableSampler(dataset, seed=...))"
            )
        own = {"loops": checkpoint["loops"], "random": RandomState().get()}
        checkpoint["rank_states"] = shared.gathered(own)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: _State) -> None:
        """Restore this rank's state if training resumes from the checkpoint."""
        states = checkpoint.get("rank_states")
        if states is None or trainer.state.fn != "fit":
            return
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"{len(states)} ranks saved the checkpoint, and {trainer.world_size} load it: random "
                "generators keep their state, and data loaders get the positions of rank 0"
            )
            return
        own = states[trainer.global_rank]
        checkpoint["loops"], self._resumed = own["loops"], own["random"]
        RandomState().set(own["random"])  # a new epoch's order is drawn before its first batch

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Restore the generators again within an epoch, because the new data loader drew from them."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and batch_idx:
            RandomState().set(resumed)


def _is_shuffled(trainer: Any) -> bool:
    """Return True if a training loader draws its order from a generator."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    samplers = [getattr(loader, "sampler", None) for loader in loaders]
    # torchdata's is no subclass of torch's
    return any(type(sampler).__name__ == "RandomSampler" for sampler in samplers)


class _NothingYet(dict[str, Any]):
    """Stands for the checkpoint of a run killed in its first save: falsy, so that the Trainer restores
    nothing.
    """

    def __bool__(self) -> bool:
        return False


def _is_of_lightning(path: _Path) -> bool:
    """Return True for a file or folder saved by Lightning."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, SHARDS))  # noqa: PTH113, PTH118 - or a URL


def _take_none(storage_options: Any | None) -> None:
    if storage_options is not None:
        raise OptionError("pass storage_options to the plug-in or strategy, which also needs them to load")


def _begin(saves: PathSaves, state: _State, path: _Path, checkpoint: Mapping[str, Any]) -> None:
    saves.begin(state, path, step=checkpoint.get("global_step"))
    if os.path.basename(path).startswith(BEFORE_REQUEUE):  # noqa: PTH119 - may be a URL
        saves.wait()


def _newest_good(
    path: _Path, load: Callable[[_Path], _State], storage_options: Mapping[str, Any] | None
) -> _State:
    """Load ``path``; for a damaged or uncommitted "last", load the newest valid neighbor.

    All ranks call with equal arguments, and ``load`` raises the same error on all.
    """
    try:
        return load(path)
    except UnsafeObjectError as error:
        error.add_note("With Lightning: Trainer.fit(..., weights_only=False), or add_safe_globals() before.")
        raise
    except (CheckpointNotFoundError, CorruptCheckpointError) as error:
        has_files = any(getattr(cause, "data_files", 1) for cause in causes_of(error))
        if not has_files or not os.path.basename(path).startswith(LAST):  # noqa: PTH119 - may be a URL
            raise
        refused = error
    for other in shared.on_first_rank(lambda: shared.committed_beside(path, storage_options)):
        rank_zero_warn(f"{path} cannot be loaded ({causes_of(refused)[0]}): loading {other} instead")
        try:
            return load(other)
        except CorruptCheckpointError as error:
            refused = error
    if isinstance(refused, CorruptCheckpointError):
        raise refused
    rank_zero_warn(
        f"the save to {path} was never committed, and its folder has no other checkpoint: "
        "training starts from the beginning"
    )
    return _NothingYet({VERSION: lightning.__version__})


# -- checkpoints as plain containers and back ---------------------------------------------------------------


def _sealed(checkpoint: Mapping[str, Any]) -> _State:
    """Return a checkpoint in a form that `dcp.save` stores without loss; the argument is unchanged.

    Dicts and lists are opened, to name each tensor. Containers of other classes (defaultdict, OmegaConf's),
    objects with ``state_dict()``, and dicts with colliding keys are stored as one value in a tuple; an
    OrderedDict is noted, with a module's ``_metadata``.
    """
    form: dict[str, list[Any]] = {"sealed": [], "ordered": []}
    state = {key: _seal(value, (key,), form) for key, value in checkpoint.items()}
    return {**state, _FORM: (form,)}


def _opened(state: _State) -> _State:
    """Restore the checkpoint of `_sealed` in place."""
    (form,) = state.pop(_FORM, ({"sealed": [], "ordered": []},))
    for keys in form["sealed"]:
        holder: Any = reduce(getitem, keys[:-1], state)
        (holder[keys[-1]],) = holder[keys[-1]]
    for keys, versions in sorted(form["ordered"], key=lambda noted: -len(noted[0])):  # the innermost first
        holder = reduce(getitem, keys[:-1], state)
        ordered: Any = OrderedDict(holder[keys[-1]])
        if versions is not None:
            ordered._metadata = versions
        holder[keys[-1]] = ordered
    return state


def _seal(value: Any, keys: tuple[Any, ...], form: dict[str, list[Any]]) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if type(value) in (dict, OrderedDict) and _are_names(value):
        if type(value) is OrderedDict:
            form["ordered"].append((keys, getattr(value, "_metadata", None)))
        return {key: _seal(entry, (*keys, key), form) for key, entry in value.items()}
    if type(value) is list:
        return [_seal(entry, (*keys, position), form) for position, entry in enumerate(value)]
    if isinstance(value, Mapping | list | PerRank) or hasattr(value, "state_dict"):
        form["sealed"].append(keys)
        return (value,)
    return value


def _are_names(mapping: Mapping[Any, Any]) -> bool:
    """Return True if all keys are valid and distinct name parts."""
    if any(plain_key(key) is NO_PLAIN_KEY for key in mapping):
        return False
    names = Counter(map(str, mapping))
    return len(names) == len(mapping) and not any(
        name[:end] in names for name in names for end in range(len(name)) if name[end] == "."
    )
