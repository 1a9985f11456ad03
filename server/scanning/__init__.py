"""Finding checkpoints below roots, and what the catalog keeps of each.

It reads storage and writes through `dcp.server.catalog`; when it runs is said by the job ``scan``.
"""
