"""`CheckpointManager`: when to save, what to keep, where to resume.

Which steps are saved is agreed in `coordination`, one save is carried out in `saving`, `retention` says what
goes, `removal` and `dropping` remove it, and notes to a catalog are in `catalog`. How a state dict is saved
is not known here.
"""
