"""Boxes of tensors in the memory of a rank, for saves and loads."""
