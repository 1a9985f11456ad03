"""Routes of what the catalog knows: checkpoints, runs, roots, labels, lineage, and deleting with grace.

None of them opens a checkpoint, but registration, which looks at it once.
"""
