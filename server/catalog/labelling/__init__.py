"""What people and programs say of checkpoints: tags, pins, metrics, and aliases of runs.

What a checkpoint says of itself is in `dcp.server.catalog.checkpoints`.
"""
