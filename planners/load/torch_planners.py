"""torch's other load planners: one that makes the state dict, one for files without metadata."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp.planners.flatten import set_element
from dcp.planners.load.planner import DefaultLoadPlanner
from dcp.planners.wire.torch_plans import known_provenance
from dcp.storage.errors import MissingKeyError, PlanError
from dcp.storage.formats.container_notes import empty_dicts, notes_by_path, with_original_keys
from dcp.storage.formats.index import Path

__all__ = ["DynamicMetaLoadPlanner", "EmptyStateLoadPlanner"]


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
