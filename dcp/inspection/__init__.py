"""What checkpoints there are, what is in them, and whether it is intact. Imports no torch.

Indexes alone tell what is in this folder, but for verification, which reads everything; `values` has the
numbers in tensors. Functions return data classes, which the command line and the service render.
"""

from dcp.inspection.checkpoints import (
    CheckpointHeader,
    CheckpointSummary,
    header_of,
    list_checkpoints,
    name_and_step,
    open_index,
)
from dcp.inspection.entries import (
    ModuleNode,
    ObjectRow,
    TensorRow,
    module_tree,
    object_row,
    object_rows,
    tensor_rows,
)

__all__ = [
    "CheckpointHeader",
    "CheckpointSummary",
    "ModuleNode",
    "ObjectRow",
    "TensorRow",
    "header_of",
    "list_checkpoints",
    "module_tree",
    "name_and_step",
    "object_row",
    "object_rows",
    "open_index",
    "tensor_rows",
]
