"""Planners for an empty dict: what a checkpoint has, without a state dict that says what is wanted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp.conversion.contents.entries import Entries, choose_entries
from dcp.loading.planner import DefaultLoadPlanner
from dcp.planners.flatten import set_element
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.torch_plans import index_from_metadata, known_provenance
from dcp.storage.errors import MissingKeyError, PlanError
from dcp.storage.formats.container_notes import empty_dicts, notes_by_path, with_original_keys
from dcp.storage.formats.index import Path
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.tensors import torch_dtype
from dcp.storage.torch_storage.metadata import LazyMetadata

__all__ = ["DynamicMetaLoadPlanner", "EmptyStateLoadPlanner", "ReadDtype", "WholePlanner"]

ReadDtype = torch.dtype | str | Mapping[str, torch.dtype | str]
"""One dtype for all floating-point tensors, or dtypes by glob of their names (the first match counts)."""

_SIZE = "torch.Size"


class WholePlanner(DefaultLoadPlanner):
    """Fills a flat dict with what is chosen of the checkpoint; `nested` makes the state dict of it."""

    def __init__(
        self,
        *,
        only: Patterns | None,
        exclude: Patterns | None,
        rename: Rename | None,
        dtype: ReadDtype | None,
        device: torch.device,
        weights_only: bool | None,
    ) -> None:
        super().__init__(
            flatten_state_dict=False,
            dtype="exact" if dtype is None else "cast",
            weights_only=weights_only is not False,
        )
        # not the planner's own options of these names, which are about the state dict that is filled
        self._chosen: dict[str, Any] = {
            "only": only,
            "exclude": exclude,
            "rename": rename,
            "dtype": {glob: str(each) for glob, each in dtype.items()}
            if isinstance(dtype, Mapping)
            else dtype and str(dtype),
        }
        self._device = device
        self._entries: Entries | None = None
        self._tied: dict[str, str] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Make memory for what is chosen; ``state_dict`` has at most what an attempt that failed has left."""
        if metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        if isinstance(metadata, LazyMetadata) and metadata.has_index:
            index = metadata.index
        else:
            index = index_from_metadata(metadata)
        self._entries = entries = choose_entries(index, **self._chosen)
        tensors = entries.tensors
        self._tied = {
            entry.fqn: tensors[entry.tied_to].fqn
            for number, entry in enumerate(tensors)
            if entry.tied_to != number
        }
        state_dict.clear()
        for entry, shape in zip(tensors, entries.shapes, strict=True):
            if entry.fqn not in self._tied:
                state_dict[entry.fqn] = torch.empty(
                    shape, dtype=torch_dtype(entry.dtype_code), device=self._device
                )
        state_dict.update(dict.fromkeys(value.fqn for value in entries.values))
        state_dict.update(dict.fromkeys(entries.refused))  # planning says what they need
        self.rename = entries.source_names.__getitem__
        super().set_up_planner(state_dict, metadata, is_coordinator)

    @property
    def paths(self) -> Mapping[str, Path]:
        """Return where the chosen entries are in what `nested` gives."""
        return self._entries.paths if self._entries is not None else {}

    def nested(self, flat: dict[str, Any]) -> dict[str, Any]:
        """The state dict whose flat entries were loaded into ``flat``."""
        entries = self._entries
        if entries is None:
            raise PlanError("nothing was read yet")
        structure = entries.structure()
        kinds = structure.get("values", {}) if structure is not None else {}

        def value_of(fqn: str) -> Any:
            value = flat.get(self._tied.get(fqn, fqn))
            return torch.Size(value) if kinds.get(fqn) == _SIZE and isinstance(value, tuple) else value

        paths = entries.paths
        found = restore_structure(structure, paths | _gaps(entries, structure), value_of)
        return found if isinstance(found, dict) else {fqn: value_of(fqn) for fqn in paths}


def _gaps(entries: Entries, structure: Mapping[str, Any] | None) -> dict[str, Path]:
    """Entries for the positions of lists that were not chosen, so that the others stay where they were."""
    noted = notes_by_path(structure)
    most = entries.index.tensor_count + len(entries.index.objects) + len(noted)  # a stranger's may be endless
    chosen: dict[Path, set[int]] = {}
    for path in entries.paths.values():
        for depth, part in enumerate(path):
            if isinstance(part, int):
                chosen.setdefault(path[:depth], set()).add(part)
    places = (
        (*path, position)
        for path, positions in chosen.items()
        if max(positions) < most
        for position in range(max(positions))
        if position not in positions
    )
    return {".".join(map(str, place)): place for place in places if place not in noted}


class EmptyStateLoadPlanner(DefaultLoadPlanner):
    """Fills an empty dict with what the checkpoint has: all, or what is at or below one of ``keys``.

    A key names an entry by its flat key, or a dict or list that entries were nested in. Keys of dicts are of
    the types that were saved, where a save of ours noted these. Tensors are whole and on the CPU, on every
    rank that loads. Other than torch's planner it runs no pickle (``weights_only``), and raises
    MissingKeyError for a key that the checkpoint does not have.
    """

    def __init__(self, keys: Collection[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"unexpected": "ignore"} | kwargs)  # the dict has what was asked for
        self.keys = keys
        self._filled: dict[str, Any] | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Build what is to be loaded in ``state_dict``, which has to be empty."""
        if state_dict is self._filled:
            state_dict.clear()  # what an attempt that failed has left
        if state_dict:
            raise PlanError(f"{type(self).__name__} fills an empty dict, and this one has entries")
        if metadata is None:
            raise PlanError("the load planner was set up without the checkpoint's metadata")
        self._filled = state_dict
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        notes = notes_by_path(known_provenance(metadata).get("structure"))
        nested: dict[str, Any] = {}
        found: set[str] = set()
        entries = metadata.state_dict_metadata
        in_order = dict.fromkeys((*(fqn for fqn in paths if fqn in entries), *entries))
        for fqn in in_order:
            entry = entries[fqn]
            path = paths.get(fqn, (fqn,))
            names = {fqn, *_ancestors(path)}
            if self.keys is not None and names.isdisjoint(self.keys):
                continue
            found |= names
            value: Any = entry
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            set_element(nested, path, value)
        for path in empty_dicts(notes, paths.values()):
            names = set(_ancestors(path))
            if self.keys is None or not names.isdisjoint(self.keys):
                found |= names
                set_element(nested, path, {})
        state_dict.update(with_original_keys(nested, notes))
        absent = sorted(set(self.keys or ()) - found)
        if absent:
            raise MissingKeyError(
                f"the checkpoint has nothing under {', '.join(map(repr, absent))}", fqns=absent
            )
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _ancestors(path: Path) -> list[str]:
    """The flat names of what is at ``path``, and of all that it is nested in."""
    return list(accumulate(map(str, path), "{}.{}".format))


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Plans the load of a torch.save file, as torch's example has it::

        dcp.load(
            state_dict,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id="model.pt",
        )

    torch's planner takes shapes and dtypes from the state dict, because its reader has read nothing yet. Ours
    reads the file's own index first, so that this is `DefaultLoadPlanner`: what does not fit is an error that
    names it, and values other than tensors load.
    """
