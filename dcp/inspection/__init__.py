"""Inspection: which checkpoints there are, what is in them, and whether it is intact. Imports no torch.

Indexes alone tell what is in this folder, but for verification, which reads everything; `values` has the
numbers in tensors. Functions return data classes, which the command line and the service render.
"""
