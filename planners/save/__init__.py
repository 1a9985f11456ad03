"""The save planner: the boxes of all ranks, checked, joined and dealt out to writers.

The boxes that a rank holds are found by `dcp.planners.layout`.
"""
