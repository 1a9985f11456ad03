"""Contents of conversions: entries under their names, casts, values that are no tensors.

Where it goes in a target is in `dcp.conversion.layouts` and `dcp.conversion.targets`.
"""
