"""torch's `DynamicMetaLoadPlanner`, which is to be used with a reader that knows no metadata."""

from __future__ import annotations

from dcp.planners.load.planner import DefaultLoadPlanner

__all__ = ["DynamicMetaLoadPlanner"]


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
