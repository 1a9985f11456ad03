"""Arguments of public functions: checkpoint id or storage, a state dict with `Stateful` objects, ranks."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp.calls.plain_errors import warn_caller
from dcp.storage.errors import CheckpointError, OptionError
from dcp.storage.stores import open_store
from dcp.storage.stores.opening import OpenWith, check_storage_options
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


P = ParamSpec("P")
R = TypeVar("R")

_PLAIN_TYPES = frozenset(
    {dict, list, tuple, str, bytes, int, float, bool, type(None), torch.Tensor, torch.nn.Parameter, DTensor}
)


def takes_storage_second(argument: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to accept the keyword ``argument`` as second positional argument, with torch's
    warning.

    torch accepted it before version 2.2. Raises OptionError if the state dict is a path.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            refuse_a_place(name, args[0] if args else kwargs.get("state_dict"))
            if len(args) == 2 and argument not in kwargs:
                warn_caller(
                    f"The argument order of {name} has been changed. Please check the document to avoid "
                    "future breakages."
                )
                return cast("Callable[..., R]", function)(args[0], **kwargs, **{argument: args[1]})
            return cast("Callable[..., R]", function)(*args, **kwargs)

        return cast("Callable[P, R]", call)

    return decorate


def refuse_a_place(function: str, state_dict: object) -> None:
    """Raise OptionError if the state dict of ``function`` is a path or URL."""
    if isinstance(state_dict, str | bytes | os.PathLike):
        raise OptionError(
            f"{function}: the first argument must be the state dict, not the path or URL {state_dict!r}: "
            f"call dcp.{function}(state_dict, checkpoint_id={state_dict!r})"
        )


# -- the top level of a state dict ---------------------------------------------------------------------------


def check_top_level(state_dict: Any) -> None:
    """Raise OptionError for a value without entries: a module, an optimizer, a list."""
    if isinstance(state_dict, Mapping) or hasattr(state_dict, "items"):
        return
    name = type(state_dict).__name__
    way = f'pass {{"model": ...}} with the {name} as a value' if is_stateful(state_dict) else "pass a dict"
    raise OptionError(f"state_dict must be a dict with string keys, not a {name}: {way}")


def is_stateful(value: Any) -> bool:
    """Return whether ``value`` has the `Stateful` protocol. Takes 20 microseconds, except for tensors and
    plain data.
    """
    if type(value) in _PLAIN_TYPES or isinstance(value, torch.Tensor):
        return False
    return isinstance(value, Stateful)


def stateful_keys(keys: Iterable[Any], values: Collection[Any]) -> list[Any]:
    """Return the ``keys`` with a `Stateful` in ``values``, in order."""
    if _PLAIN_TYPES.issuperset(map(type, values)):
        return []
    return [key for key, value in zip(keys, values, strict=True) if is_stateful(value)]


def stateful_to_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace top-level `Stateful` objects by their state. Raises OptionError for a state dict without
    entries.
    """
    check_top_level(state_dict)
    plain = dict(state_dict.items())
    for key in stateful_keys(plain, plain.values()):
        plain[key] = plain[key].state_dict()
    return plain


# -- storages ------------------------------------------------------------------------------------------------


def _chosen(
    ours: type[FileSystemReader] | type[FileSystemWriter],
    storage: Any,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    if storage is not None:
        _refuse_others(storage, ours is FileSystemReader, storage_options)
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    opener = OpenWith(storage_options)
    if not checkpoint_id:
        raise CheckpointError(
            "`checkpoint_id` must be specified if storage_reader/storage_writer is None: pass a path, a "
            "URL, or a storage with its own id"
        )
    opener(checkpoint_id)  # raises early for an id without a store
    return ours(checkpoint_id, open_store=opener)


choose_reader: Callable[..., StorageReader] = functools.partial(_chosen, FileSystemReader)
"""Return a reader for a checkpoint id: the given one, or a `FileSystemReader`."""

choose_writer: Callable[..., StorageWriter] = functools.partial(_chosen, FileSystemWriter)
"""Return a writer for a checkpoint id: the given one, or a `FileSystemWriter`."""


def with_options(writer: FileSystemWriter, opener: OpenWith) -> FileSystemWriter:
    """Open the store of ``writer`` with the options of ``opener``, unless it has its own."""
    own = writer.open_store
    if own is open_store or (isinstance(own, OpenWith) and not own.storage_options):
        through_fsspec = isinstance(own, OpenWith) and own.through_fsspec
        writer.open_store = OpenWith(opener.storage_options, through_fsspec=through_fsspec)
    return writer


def with_own_id(writer: StorageWriter) -> StorageWriter:
    """Copy a `FileSystemWriter`: the caller may set its next id while a save with the copy runs.

    Other writers are returned unchanged, because they cannot be copied in general.
    """
    return copy.copy(writer) if isinstance(writer, FileSystemWriter) else writer


def _refuse_others(storage: object, is_read: bool, storage_options: Mapping[str, Any] | None) -> None:
    argument = "storage_reader" if is_read else "storage_writer"
    method = "read_metadata" if is_read else "write_data"
    # The second positional argument is the storage, as before torch 2.2; users may pass a path.
    if isinstance(storage, str | os.PathLike):
        raise CheckpointError(
            f"{os.fspath(storage)!r} was passed as {argument}; pass a path or URL by its keyword: "
            f"checkpoint_id={os.fspath(storage)!r}"
        )
    if isinstance(storage, type):
        raise CheckpointError(f"{argument} is the class {storage.__name__}; pass an instance")
    if not hasattr(storage, method):
        raise CheckpointError(f"{type(storage).__name__} is not a {argument}: it has no method {method}")
    check_storage_options(storage_options)
    if storage_options:
        raise CheckpointError(
            f"storage_options apply to a storage chosen by checkpoint_id, but {argument} is given: pass the "
            f"options to the constructor of {type(storage).__name__}, as in "
            "dcp.FsspecReader(url, **options)"
        )


# -- ranks ---------------------------------------------------------------------------------------------------


def works_alone(process_group: ProcessGroup | None, *, no_dist: bool, operation: str) -> bool:
    """Return whether an ``operation`` runs in this process alone, by request or without torch.distributed.

    Raises CheckpointError for a destroyed process group, and for a save with ``WORLD_SIZE`` above 1 without a
    group, in which the ranks would overwrite each other's files. A load in such a process only warns; a read
    does not, because it returns the same on every rank.
    """
    if isinstance(no_dist, str):  # "false" would count as True
        raise OptionError(f"no_dist must be True or False, not {no_dist!r}")
    if no_dist:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    if process_group is not None:
        raise CheckpointError(
            "a process group was given, but torch.distributed is no longer initialised: save before "
            "destroy_process_group(), or pass no_dist=True to work on one rank"
        )
    count = os.environ.get("WORLD_SIZE", "")
    if not count.isdecimal() or int(count) < 2 or operation == "read":
        return True
    facts = f"this is one of {count} processes (WORLD_SIZE), and torch.distributed is not initialised"
    if operation != "load":
        raise CheckpointError(
            f"{facts}: the processes would overwrite each other's {operation}. Call init_process_group() "
            "first, or pass no_dist=True to use this process alone",
        )
    warn_caller(
        f"{facts}: this process loads alone, as rank 0; call init_process_group() first, or pass no_dist=True"
    )
    return True
