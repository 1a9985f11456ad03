"""The default load planner: columns for our own engine, torch's plan objects for everybody else's."""

from __future__ import annotations

import io
import pickle
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import default_planner as torch_planner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from dcp.planners.columns import LoadColumns
from dcp.planners.flatten import flatten_state_dict as flatten
from dcp.planners.flatten import replace_element
from dcp.planners.load_plan import WantedColumns, plan_load
from dcp.planners.local import LocalTensors, collect_tensors
from dcp.planners.lookup import BoxLookup
from dcp.planners.materialise import has_meta_tensor, materialise
from dcp.planners.save_planner import _current_rank, flatten_sharded
from dcp.planners.torch_plans import index_from_metadata, read_items
from dcp.storage.errors import CheckpointFormatError, PlanError, UnsafeObjectError
from dcp.storage.formats.index import CheckpointIndex, Path

__all__ = ["DefaultLoadPlanner", "load_object", "uses_columns"]


class DefaultLoadPlanner(torch_planner.DefaultLoadPlanner):
    """Plans as torch's planner of that name does, with dtypes checked and objects loaded safely.

    The positional parameters are torch's. ``dtype="cast"`` lets stored values be converted to the dtype of
    the state dict; "exact" raises DtypeMismatchError. ``weights_only=False`` lets stored objects run code
    (pickle); give it only for checkpoints you trust. ``rank`` is this process's number, for `PerRank` values.

    After planning, ``missing_keys`` (only with ``allow_partial_load``), ``unexpected_keys`` and ``cast_keys``
    say what was passed over.
    """

    mappings: dict[str, Path]

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        dtype: Literal["exact", "cast"] = "exact",
        weights_only: bool = True,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.dtype = dtype
        self.weights_only = weights_only
        self.rank: int | None = None
        self.missing_keys: tuple[str, ...] = ()
        self.unexpected_keys: tuple[str, ...] = ()
        self.cast_keys: tuple[str, ...] = ()
        self._lookup = BoxLookup()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict to load into; tensors on the meta device are replaced in it by real ones."""
        self.original_state_dict = state_dict
        flat = self._flattened(state_dict, legacy=False)
        if has_meta_tensor(flat.values()):
            materialise(state_dict)
            flat = self._flattened(state_dict, legacy=False)
        self.state_dict = flat
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._lookup = BoxLookup()

    def _flattened(self, state_dict: dict[str, Any], *, legacy: bool) -> dict[str, Any]:
        flat = state_dict
        if self.flatten_state_dict:
            rank = self.rank if self.rank is not None else _current_rank()
            flat, self.mappings = flatten(state_dict, rank=rank, legacy=legacy)
        return flatten_sharded(flat) if self.flatten_sharded_tensors else flat

    # -- columns ---------------------------------------------------------------------------------------------

    def create_load_columns(self, index: CheckpointIndex) -> tuple[LoadColumns, list[torch.Tensor]]:
        """(what to read, local tensors by destination number).

        The tensors are the state dict's own and may require grad. Raises one error with everything that does
        not fit (see `dcp.planners.load_plan.plan_load`).
        """
        columns, _, local = self._plan(index)
        return columns, local.sources

    def store_object(self, fqn: str, value: Any) -> None:
        """Put a loaded value where the state dict has the flat key ``fqn``."""
        if self.flatten_state_dict:
            replace_element(self.original_state_dict, self.mappings[fqn], value)
            return
        self.state_dict[fqn] = value
        if self.original_state_dict is not self.state_dict:
            self.original_state_dict[fqn] = value

    def store_blob(self, fqn: str, blob: bytes | io.BytesIO) -> None:
        """As `store_object`, from the value's torch.save bytes."""
        self.store_object(fqn, load_object(fqn, blob, weights_only=self.weights_only))

    def _plan(self, index: CheckpointIndex) -> tuple[LoadColumns, WantedColumns, LocalTensors]:
        self._use_legacy_keys(index)
        local = collect_tensors(self.state_dict, purpose="load")
        wanted = WantedColumns(
            fqns=local.fqns,
            dtype_codes=local.dtype_codes,
            shape_start=local.shape_start,
            shape_values=local.shape_values,
            box_tensors=local.item_tensors,
            box_offsets=local.item_offsets,
            box_sizes=local.item_sizes,
            box_local_offsets=local.item_local_offsets,
            box_dests=local.item_sources,
            object_fqns=tuple(local.objects),
        )
        columns = plan_load(index, wanted, allow_missing=self.allow_partial_load, cast=self.dtype == "cast")
        findings = columns.extra
        self.missing_keys, self.unexpected_keys = findings.missing, findings.unexpected
        self.cast_keys = findings.cast
        return columns, wanted, local

    def _use_legacy_keys(self, index: CheckpointIndex) -> None:
        """Take the keys of torch before 2.4 where the checkpoint has those instead of today's."""
        tensors, objects = index.position, index.objects.position
        if not self.flatten_state_dict or all(fqn in tensors or fqn in objects for fqn in self.state_dict):
            return
        current, mappings = self.state_dict, self.mappings
        legacy = self._flattened(self.original_state_dict, legacy=True)
        if any(fqn not in current and (fqn in tensors or fqn in objects) for fqn in legacy):
            self.state_dict = legacy
        else:
            self.mappings = mappings

    # -- torch's interface -----------------------------------------------------------------------------------

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads, as torch's plan."""
        if self.metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        index = index_from_metadata(self.metadata)
        columns, wanted, _ = self._plan(index)
        return LoadPlan(read_items(columns, wanted, index))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the stored bytes of an object."""
        self.store_blob(read_item.dest_index.fqn, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """A fresh buffer: objects are replaced, not filled."""
        return io.BytesIO()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The view of the wanted box that ``index`` names."""
        tensor: torch.Tensor = self._lookup.find(self.state_dict, index)
        return tensor


_COLUMNAR_STEPS = (
    "create_load_columns",
    "store_object",
    "store_blob",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_bytes",
    "resolve_tensor",
    "commit_tensor",
    "lookup_tensor",
    "transform_tensor",
)


def uses_columns(planner: LoadPlanner) -> bool:
    """Whether `dcp.load` may plan with columns: ours, with none of the steps overridden that these leave
    out."""
    return isinstance(planner, DefaultLoadPlanner) and all(
        getattr(type(planner), step) is getattr(DefaultLoadPlanner, step) and step not in vars(planner)
        for step in _COLUMNAR_STEPS
    )


def load_object(fqn: str, blob: bytes | io.BytesIO, *, weights_only: bool) -> Any:
    """The value of torch.save bytes.

    Raises UnsafeObjectError where it needs a class or function that `torch.load(weights_only=True)` does not
    allow, CheckpointFormatError where the bytes are damaged.
    """
    buffer = io.BytesIO(blob) if isinstance(blob, bytes | bytearray | memoryview) else blob
    begin = buffer.tell()
    head = buffer.read(2)
    buffer.seek(begin)
    if head != b"PK" and head[:1] != b"\x80":
        raise CheckpointFormatError(f"object {fqn!r} was not written by torch.save, or is damaged", fqn=fqn)
    try:
        return torch.load(buffer, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise _refused(fqn, str(error), weights_only=weights_only) from error
    except Exception as error:
        if not weights_only:  # code of the checkpoint's own classes ran, and it is their error
            raise
        # Damaged bytes make torch's unpickler raise whatever its steps do: ValueError, IndexError, KeyError.
        raise CheckpointFormatError(f"object {fqn!r} is damaged: {_first_line(error)}", fqn=fqn) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refused(fqn: str, text: str, *, weights_only: bool) -> CheckpointFormatError:
    reason = next((line.strip() for line in text.splitlines() if "nsupported" in line), "")
    if not weights_only or not reason:
        return CheckpointFormatError(f"object {fqn!r} cannot be unpickled: {text[:300]}", fqn=fqn)
    return UnsafeObjectError(
        f"object {fqn!r} needs more than plain data to load ({reason[:300]}). If you trust the checkpoint, "
        "plan with weights_only=False, or allow the class with torch.serialization.add_safe_globals",
        fqn=fqn,
    )
