"""Whole checkpoints, or parts of them: a state dict that is made for what is chosen, and filled by a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dcp.conversion.entries import Entries, choose_entries
from dcp.loading.feature import Stored, Target
from dcp.planners.load.selection import Patterns, Rename
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import notes_by_path
from dcp.storage.formats.index import Path
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.tensors import torch_dtype

__all__ = ["ReadDtype", "Whole"]

ReadDtype = torch.dtype | str | Mapping[str, torch.dtype | str]
"""One dtype for all floating-point tensors, or dtypes by glob of their names (the first match counts)."""

_SIZE = "torch.Size"


class Whole(Target):
    """A flat state dict of what is chosen of the checkpoint; `nested` makes one of it that is nested.

    `stored` is the renaming of the load that fills it.
    """

    def __init__(
        self,
        *,
        only: Patterns | None = None,
        exclude: Patterns | None = None,
        rename: Rename | None = None,
        dtype: ReadDtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__({})
        self._chosen: dict[str, Any] = {"only": only, "exclude": exclude, "rename": rename}
        if isinstance(dtype, Mapping):
            self._chosen["dtype"] = {glob: str(each) for glob, each in dtype.items()}
        else:
            self._chosen["dtype"] = dtype and str(dtype)
        self._device = device
        self._entries: Entries | None = None
        self._tied: dict[str, str] = {}

    def state(self, stored: Stored) -> dict[str, Any]:
        """Make memory for what is chosen, in place of what an attempt that failed has left."""
        self._entries = entries = choose_entries(stored.index_of(), **self._chosen)
        tensors, flat = entries.tensors, self.state_dict
        flat.clear()
        self._tied = {}
        for number, (entry, shape) in enumerate(zip(tensors, entries.shapes, strict=True)):
            if entry.tied_to != number:
                self._tied[entry.fqn] = tensors[entry.tied_to].fqn
            else:
                dtype = torch_dtype(entry.dtype_code)
                flat[entry.fqn] = torch.empty(shape, dtype=dtype, device=self._device)
        flat.update(dict.fromkeys(value.fqn for value in entries.values))
        flat.update(dict.fromkeys(entries.refused))  # planning says what they need
        return flat

    def stored(self, fqn: str) -> str:
        """Return what the checkpoint calls an entry."""
        return self._known.source_names[fqn]

    @property
    def _known(self) -> Entries:
        if self._entries is None:
            raise PlanError("nothing was read yet")
        return self._entries

    @property
    def paths(self) -> Mapping[str, Path]:
        """Return where the chosen entries are in what `nested` gives."""
        return self._known.paths

    def nested(self) -> dict[str, Any]:
        """Return the nested state dict of what was loaded."""
        entries, flat = self._known, self.state_dict
        structure = entries.structure()
        kinds = structure.get("values", {}) if structure is not None else {}

        def value_of(fqn: str) -> Any:
            value = flat.get(self._tied.get(fqn, fqn))
            return torch.Size(value) if kinds.get(fqn) == _SIZE and isinstance(value, tuple) else value

        paths = entries.paths
        found = restore_structure(structure, paths | _gaps(entries, structure), value_of)
        return found if isinstance(found, dict) else {fqn: value_of(fqn) for fqn in paths}


def _gaps(entries: Entries, structure: Mapping[str, Any] | None) -> dict[str, Path]:
    """Return entries for the positions of lists that were not chosen, so that the others stay where they
    were."""
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
