"""The save planner: the boxes of all ranks, checked, joined and dealt out to writers.

What a rank holds is known to `dcp.planners.layout`.
"""
