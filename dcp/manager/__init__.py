"""`CheckpointManager`: when to save, what to keep, where to resume.

Which steps are saved is agreed in `coordination`, one save is carried out in `saving`, what goes is deleted
in `cleanup`, and what a catalog is told is in `catalog`. How a state dict is saved is not known here.
"""
