"""`CheckpointManager`: schedule saves, retain steps, and resume.

`coordination` agrees on the steps to save, `saving` runs saves, `retention` selects steps to delete,
`removal` and `dropping` delete, and `catalog` notifies a catalog.
"""
