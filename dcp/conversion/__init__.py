"""Conversion of checkpoints between formats: read an index, lay out the target, copy byte ranges. Imports no
torch.

`dcp.conversion.run.convert` is the entry point (`dcp.convert`).
"""
