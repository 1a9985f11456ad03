"""Whether a copy is what the state was: samples of the source, taken before and compared after.

The copy is made by `dcp.staging.copies`.
"""
