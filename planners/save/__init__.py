"""The save planner: the boxes of all ranks, checked, merged and dealt out to writers.

What a rank holds is known to `dcp.planners.layout`.
"""
