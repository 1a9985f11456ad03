"""Load planner: wanted entries, their stored names, and the chunks to read.

`dcp.planners.layout` provides the boxes of a rank.
"""
