"""Lists of checkpoints: filters and orders as values, as SQL, and as pages; and what a scan asks for.

What one checkpoint is answered with is `dcp.server.catalog.details`.
"""
