"""Our own format: the manifest, the records of data files, and the notes about containers.

The specification is `docs/reference/format.md`.
"""
