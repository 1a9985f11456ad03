"""`CheckpointManager`: when to save, what to keep, where to resume.

One save is `dcp.background` or `dcp.saving`. Which steps are saved is agreed in `coordination`, what goes is
deleted in `cleanup`, and what a catalog is told is in `catalog`.
"""
