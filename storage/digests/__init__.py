"""Digests of tensors' logical bytes: the same however a tensor is sharded and stored, and combined from those
of its parts. What they are, and what they tell, is section 10 of `docs/format.md`.

Here is arithmetic alone; who computes them while saving or reading lies elsewhere. Torch-free.
"""
