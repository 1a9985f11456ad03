"""Save planner: check, join and distribute the boxes of all ranks.

`dcp.planners.layout` provides the boxes of a rank.
"""
