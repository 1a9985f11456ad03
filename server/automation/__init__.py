"""What the service does by itself: rules that make jobs of events, and what is due by the clock.

The jobs themselves are in `dcp.server.jobs.kinds`; which checkpoints are kept is in `dcp.server.retention`.
"""
