"""Routes of what is in a checkpoint: tensors, slices, files, shards, statistics, differences.

The work is done in `dcp.server.data`.
"""
