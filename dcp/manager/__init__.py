"""`CheckpointManager`: when to save, what to keep, where to resume.

Which steps are saved is agreed in `coordination`, one save is carried out in `saving`, what goes is deleted
in `cleanup`, and notes to a catalog are in `catalog`. How a state dict is saved is not known here.
"""
