"""The load planner: which entries are wanted, under which names, and from which chunks they come.

What a rank holds is known to `dcp.planners.layout`.
"""
