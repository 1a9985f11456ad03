"""Native format: the manifest and the records of data files.

Specified in `docs/reference/format.md`.
"""
