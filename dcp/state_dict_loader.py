"""`dcp.load`, from a checkpoint into the state dict that every rank holds, and `dcp.read`, without one."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.storage import StorageReader
from typing_extensions import Unpack, deprecated

from dcp.calls.arguments import choose_reader, takes_storage_second, works_alone
from dcp.calls.plain_errors import plain_errors
from dcp.calls.torch_names import names_of
from dcp.default_planner import DefaultLoadPlanner
from dcp.engines.run import load_engine, load_with
from dcp.loading.feature import LoadReport, Target
from dcp.loading.load import ReadDtype, Whole
from dcp.planners.load.selection import LoadKeywords, LoadOptions, Patterns, Rename
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.ranks.agreement import raise_on_all_ranks
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.storage.engine.requests import Verify
from dcp.storage.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import LoadPlanner

__all__ = ["LoadKeywords", "load", "load_state_dict", "read"]

if not TYPE_CHECKING:
    __getattr__ = names_of("state_dict_loader")


F = TypeVar("F", bound=Callable[..., Any])


def lists_options(function: F) -> F:
    """Decorate ``function`` so that its signature lists what its ``**options`` are."""
    own = inspect.signature(function)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
        for name, kind in LoadKeywords.__annotations__.items()
    ]
    vars(function)["__signature__"] = own.replace(parameters=[*list(own.parameters.values())[:-1], *named])
    return function


@plain_errors
@takes_storage_second("storage_reader")
@lists_options
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[LoadKeywords],
) -> LoadReport:
    """Load a checkpoint in place into a sharded state dict; every rank of the process group calls it alike.

    Tensors are filled where they are, with any sharding, device or stride; other values are replaced;
    `Stateful` objects give their ``state_dict()`` to be filled and get it back by ``load_state_dict()``.
    Optimizers that have made no step get the state that the checkpoint has, also those that are attributes of
    such an object. The checkpoint may be dcp's or stock torch's, saved by any number of ranks. One that is
    replaced while it is being read is read anew, at most twice.

    Entries of the checkpoint under keys of the top level that ``state_dict`` does not have are not asked for
    and not loaded. An object is given what was saved also where its own ``state_dict()`` has less or another
    kind: an empty dict or list, a plain tensor of another shape, None in place of a tensor, which then comes
    whole and on the CPU. Dicts that name the parameters of models and optimizers do not change by that. What
    lies below a key of ``state_dict``, and has no place in the dict or object there on any rank, would be
    lost: see ``unexpected``. `LoadReport.unexpected` has what was not loaded.

    The arguments up to ``no_dist`` are torch's, with torch's meaning. Given a planner or reader, its own
    settings hold where those of here are None.

    Args:
        state_dict: What is to be filled; nested dicts and lists of tensors, values and `Stateful` objects.
        checkpoint_id: A path or URL: a checkpoint of dcp or stock torch, a torch.save file, a safetensors
            file, or a Hugging Face folder.
        storage_reader: Reads the checkpoint, instead of `FileSystemReader`.
        planner: Plans the load, instead of `DefaultLoadPlanner`.
        process_group: The ranks that load together; the default group without it.
        no_dist: Load in this process alone.
        timeout_seconds: The longest wait for other ranks.
        storage_options: Those of the file system of a URL, as for `dcp.save`.
        verify: "blocks" (default) compares the checksum of every block that is read whole, "full" also reads
            the rest of blocks needed in part, "none" compares nothing.
        dtype: "exact" (default) refuses another dtype than the stored one, "cast" converts.
        allow_partial_load: What the checkpoint lacks stays as it is, and is in the report.
        weights_only: False allows values of any class, whose pickles may run code: only for files you trust.
        only: Load a part: shell globs on the flat keys of ``state_dict`` (case-sensitive), each for what it
            matches and everything below, so that ``only="model"`` is the whole model. The rest is left as it
            is, and `Stateful` objects of which nothing can be selected are not asked for their state.
        exclude: The same for what is not loaded; it may also name what the checkpoint alone has.
        rename: From the state dict's keys to the checkpoint's: ``{r"^module\\.": ""}`` takes away a prefix
            that the checkpoint lacks; several keys may get one entry. Expressions that change no name are a
            warning. Views of a parameter can be loaded from
            entries of their own (``qkv[:n]`` from ``q``) as long as they are views: ``chunk``, ``split`` and
            indexing of a DTensor copy where they communicate, and the copy is filled, not the parameter;
            nothing tells one from the other.
        map: From the checkpoint's model definition to that of ``state_dict``: a ready map's name, as
            "llama:hf-to-titan", a TOML or JSON file, its data, or a `dcp.weight_map`. What is fused, split or
            permuted is read from where it is into where it belongs, however either is sharded. The names of
            all else, as of ``rename``, ``only`` and `LoadReport`, are those behind the map. Tensors that no
            rule knows stay as they are; a warning says so where that is all of them.
        per_rank: "exact" (default) wants each rank's own `PerRank` values; "keep" lets them be as they are,
            on all ranks, where another number of ranks saved the checkpoint, or it has none of them. A
            warning names what is kept, and what is left of ranks that are not there any more.
        unexpected: "error" (default) raises UnexpectedKeyError for entries that would be lost, unless
            ``exclude`` leaves them out by name; "ignore" does not.
        progress: True for a bar, or a function that gets `dcp.progress.Progress`.

    Returns:
        What was loaded, and at what cost.

    Raises:
        CheckpointNotFoundError: Nothing is committed there.
        MissingKeyError: The checkpoint lacks entries.
        UnexpectedKeyError: Entries of the checkpoint would be lost.
        ShapeMismatchError: A tensor has another shape there.
        DtypeMismatchError: A tensor has another dtype there, without ``dtype="cast"``.
        CorruptCheckpointError: Bytes are not those that were committed.
        CheckpointConflictError: It was replaced again and again while it was being read.
        StorageError: The storage cannot be read.
        UnsafeObjectError: A value needs ``weights_only=False``.
        PlanError: A pattern of ``only`` or ``exclude`` matches nothing, or the ranks called different
            operations; `OptionError`, which is one, for an option that cannot be meant.
        CollectiveTimeoutError: Ranks did not answer in time.

        These and others of `dcp.errors` are raised on all ranks alike. After an error the tensors of
        ``state_dict`` may be filled in part; no Stateful object has been touched and, unless planner or
        storage are of your own, no other value either. But where a ``load_state_dict()`` fails, others have
        their state already: PlanError if it leaves tensors on the meta device, else CheckpointError that
        names the object.
    """
    return load_with(
        state_dict,
        options,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
        storage_options=storage_options,
    )


@plain_errors
def read(
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: ReadDtype | None = None,
    device: torch.device | str = "cpu",
    verify: Verify | None = None,
    weights_only: bool | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    progress: bool | ProgressCallback | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state dict that a checkpoint holds, or a part of it, in new memory: no template is needed.

    Tensors are whole, however they were sharded, on every rank that calls this. Dicts, lists and the types of
    keys are those that were saved, as far as the format tells; tensors that were tied are one tensor. What
    was saved as `PerRank` is there for each rank, below ``rank-0`` and so on. A file of torch.save that holds
    no dict comes as one, with the names that ``dcp ls`` shows.

    Args:
        checkpoint_id: A path or URL: a checkpoint of dcp or stock torch, a torch.save file, a safetensors
            file, or a Hugging Face folder.
        storage_reader: Reads the checkpoint, instead of `FileSystemReader`.
        only: Shell globs on the checkpoint's names ("model.weight"): what they match, and everything below.
        exclude: The same for what is left out.
        rename: From the checkpoint's names to those of the result, as for `dcp.convert`: regular expressions
            with replacements, or a function.
        map: As for `load`: what another model definition makes of the checkpoint; of what is chosen only
            the bytes that it is made of are read. All other names are those behind the map.
        dtype: Floating-point tensors are converted to it; a dtype, or dtypes by glob of the checkpoint's
            names.
        device: Where the tensors are.
        verify: "blocks" (default), "full" or "none", as for `dcp.load`.
        weights_only: False allows values of any class, whose pickles may run code: only for files you trust.
        process_group: The ranks that read together; all of them call this alike.
        no_dist: Read in this process alone.
        timeout_seconds: The longest wait for other ranks.
        progress: True for a bar, or a function that gets `dcp.progress.Progress`.
        storage_options: Of the file system of a URL, as for `dcp.save`.

    Returns:
        A new dict, nested as it was saved.

    Raises:
        CheckpointNotFoundError: Nothing is committed there.
        MissingKeyError: A pattern matches nothing in the checkpoint.
        CorruptCheckpointError: Bytes are not those that were committed.
        UnsafeObjectError: A value needs ``weights_only=False``; ``exclude`` leaves it out.
        PlanError: An option cannot be meant, or the ranks called different operations.
        CollectiveTimeoutError: Ranks did not answer in time.
    """
    alone = works_alone(process_group, no_dist=no_dist, operation="read")
    ranks = Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="read")
    with raise_on_all_ranks(ranks):
        reader = choose_reader(storage_reader, checkpoint_id, storage_options)
        LoadOptions(only=only, exclude=exclude, rename=rename).check()
        whole = Whole(only=only, exclude=exclude, rename=rename, dtype=dtype, device=_device(device))
        options = LoadOptions(
            verify=verify,
            progress=progress,
            map=None if map is None else WeightMap.of(map),
            unexpected="ignore",  # all that is chosen has a place: nothing is lost
            dtype="exact" if dtype is None else "cast",
            weights_only=weights_only is not False,
            rename=whole.stored,
        )
        engine = load_engine(reader, DefaultLoadPlanner(flatten_state_dict=False), ranks, options)
    engine.load(whole)
    return whole.nested()


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device must be a device of torch's, such as 'cpu', not {device!r}") from error


@deprecated("`load_state_dict` is deprecated; use `load` instead.", category=FutureWarning)
@plain_errors
def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """`load` as it was called before torch 2.2; `Stateful` values are not asked for their state."""
    storage_reader.reset()
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """`load` without a look at `Stateful` values: torch's function for a planner that fills an empty dict."""
    alone = works_alone(process_group, no_dist=no_dist, operation="load")
    ranks = Ranks(process_group, use_dist=not alone, coordinator=coordinator_rank, operation="load")
    planner = planner if planner is not None else DefaultLoadPlanner()
    with raise_on_all_ranks(ranks):
        engine = load_engine(storage_reader, planner, ranks, LoadOptions())
    engine.load(Target(state_dict))


@plain_errors
def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read as `dcp.read` does, under torch's name, by names instead of patterns."""
    names = [keys] if isinstance(keys, str) else keys
    only = None if names is None else [re.sub(r"[*?[]", r"[\g<0>]", name) for name in names]
    return read(checkpoint_id, storage_reader=storage_reader, process_group=process_group, only=only)
