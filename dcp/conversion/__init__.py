"""Converting checkpoints between formats: an index, a target layout, copies of ranges. Imports no torch.

`dcp.conversion.run.convert` is the way in (`dcp.convert`).
"""
