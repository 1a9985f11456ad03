"""Load a checkpoint into a state dict (`dcp.load`), or read it into new tensors (`dcp.read`)."""

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
    """Decorate ``function`` so that its signature lists the keywords of its ``**options``."""
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
    """Load a checkpoint into a sharded state dict, in place. Call it on every rank of the process group.

    Tensors are filled in place with any sharding, device or stride. Other values are replaced. `Stateful`
    objects provide ``state_dict()`` and receive the result by ``load_state_dict()``. Optimizers without state
    get the saved state. The checkpoint may come from dcp or stock torch and from any number of ranks. A
    checkpoint that is replaced during the load is read again, at most twice.

    Entries under top-level keys that ``state_dict`` lacks are not loaded; `LoadReport.unexpected` lists them.
    Entries under a key of ``state_dict`` without a place in the dict or object raise UnexpectedKeyError. A
    `Stateful` object receives the saved state even if its ``state_dict()`` has empty containers, None or
    tensors of another shape; the tensors then arrive complete on the CPU. Names of parameters must match.

    The arguments up to ``no_dist`` are those of torch. With ``planner`` or ``storage_reader``, their settings
    apply where an option here is None.

    Args:
        state_dict: State to fill: nested dicts and lists of tensors, values and `Stateful` objects.
        checkpoint_id: Path or URL of a checkpoint, a torch.save file, a safetensors file or a Hugging Face
            folder.
        storage_reader: Reader to use instead of `FileSystemReader`.
        planner: Planner to use instead of `DefaultLoadPlanner`.
        process_group: Ranks that load together; the default group if None.
        no_dist: Load in this process alone.
        timeout_seconds: Longest wait for other ranks, in seconds.
        storage_options: Options of the file system of a URL, as for `dcp.save`.
        verify: "blocks" (default) compares the checksum of each block read whole; "full" also reads the rest
            of partly needed blocks; "none" compares nothing.
        dtype: "exact" (default) refuses another stored dtype; "cast" converts.
        allow_partial_load: True leaves entries unchanged if the checkpoint lacks them; the report lists them.
        weights_only: False unpickles objects of any class, which can run code. Use False for trusted files
            only.
        only: Shell patterns on the flat keys of ``state_dict``. A pattern selects the entries that it matches
            and everything below: ``only="model"`` selects the whole model. Other entries stay unchanged.
        exclude: Shell patterns of entries to leave out, also entries that only the checkpoint has.
        rename: Regular expressions from keys of the state dict to keys of the checkpoint: ``{r"^module\\.":
            ""}`` removes a prefix. Views of a parameter can be filled from separate entries (``qkv[:n]`` from
            ``q``). Do not pass ``chunk``, ``split`` or slices of a DTensor, which may be copies.
        map: Map from the checkpoint's model definition to that of ``state_dict``: a name such as
            "llama:hf-to-titan", a TOML or JSON file, its data, or a `dcp.weight_map`. ``only``, ``exclude``,
            ``rename`` and the report use names after the map. Tensors without a rule keep their names.
        per_rank: "exact" (default) requires a saved `PerRank` value for each rank; "keep" leaves values
            unchanged if another number of ranks saved the checkpoint.
        unexpected: "error" (default) raises UnexpectedKeyError; "ignore" skips entries without a place.
        progress: True for a bar, or a function that receives `dcp.progress.Progress`.

    Returns:
        A `LoadReport`: loaded names, bytes and seconds.

    Raises:
        CheckpointNotFoundError: The id has no committed checkpoint.
        MissingKeyError: The checkpoint lacks entries.
        UnexpectedKeyError: Entries of the checkpoint have no place in ``state_dict``.
        ShapeMismatchError: A stored tensor has another shape.
        DtypeMismatchError: A stored tensor has another dtype.
        CorruptCheckpointError: Stored bytes differ from the committed bytes.
        CheckpointConflictError: The checkpoint was replaced repeatedly during the load.
        StorageError: The storage cannot be read.
        UnsafeObjectError: A value needs ``weights_only=False``.
        PlanError: A pattern matches nothing, or the ranks called different operations.
        OptionError: An option has an invalid value.
        CollectiveTimeoutError: Other ranks did not answer in time.

    All ranks raise the same error. After an error, tensors may be partly filled; values and `Stateful`
    objects are unchanged, unless a custom planner, a custom storage or a ``load_state_dict()`` failed.

    Examples:
        ```python
        state = {"model": model.state_dict(), "step": 0}
        report = dcp.load(state, checkpoint_id="runs/first/step-00000100")
        ```
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
    """Read a checkpoint, or a part of it, into a new state dict.

    Tensors are complete on every calling rank. Dicts, lists and types of keys are restored as far as the
    format records them. Tied tensors become one tensor. `PerRank` values appear for each rank, under
    ``rank-0`` and so on. A torch.save file without a dict becomes a dict with the names of ``dcp ls``.

    Args:
        checkpoint_id: Path or URL of a checkpoint, a torch.save file, a safetensors file or a Hugging Face
            folder.
        storage_reader: Reader to use instead of `FileSystemReader`.
        only: Shell patterns on names of the checkpoint; each selects its matches and everything below.
        exclude: Shell patterns of entries to leave out.
        rename: From names of the checkpoint to names of the result, as for `dcp.convert`: regular expressions
            with replacements, or a function.
        map: Map to another model definition, as for `load`. Only bytes of selected tensors are read.
            ``only``, ``exclude`` and ``rename`` use names after the map.
        dtype: Dtype for floating-point tensors, or a dict from shell patterns to dtypes.
        device: Device of the tensors.
        verify: "blocks" (default), "full" or "none", as for `load`.
        weights_only: False unpickles objects of any class, which can run code. Use False for trusted files
            only.
        process_group: Ranks that read together; all of them call `read`.
        no_dist: Read in this process alone.
        timeout_seconds: Longest wait for other ranks, in seconds.
        progress: True for a bar, or a function that receives `dcp.progress.Progress`.
        storage_options: Options of the file system of a URL, as for `dcp.save`.

    Returns:
        A new dict, nested as it was saved.

    Raises:
        CheckpointNotFoundError: The id has no committed checkpoint.
        MissingKeyError: A pattern matches nothing in the checkpoint.
        CorruptCheckpointError: Stored bytes differ from the committed bytes.
        UnsafeObjectError: A value needs ``weights_only=False``; ``exclude`` can leave it out.
        PlanError: An option is invalid, or the ranks called different operations.
        CollectiveTimeoutError: Other ranks did not answer in time.

    Examples:
        ```python
        weights = dcp.read("runs/first/step-00000100", only="model", dtype=torch.bfloat16)["model"]
        ```
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
            unexpected="ignore",  # the result has a place for every selected entry
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
        raise OptionError(f"device must be a torch device such as 'cpu', not {device!r}") from error


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
    """Load with the signature from before torch 2.2. `Stateful` values are not asked for their state."""
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
    """Load without special treatment of `Stateful` values, as torch does for a planner that fills an empty
    dict.
    """
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
