"""Pages of values: tensors, layers, and what changed."""
