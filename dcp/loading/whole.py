"""What a checkpoint has, without a state dict that says what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcp.conversion.contents.entries import Entries, choose_entries
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.wire.torch_plans import index_from_metadata
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import notes_by_path
from dcp.storage.formats.index import Path
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.tensors import torch_dtype
from dcp.storage.torch_storage.metadata import LazyMetadata

__all__ = ["ReadDtype", "WholePlanner"]

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
        """Where the chosen entries are in what `nested` gives."""
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
