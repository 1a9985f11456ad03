"""What is inside of a checkpoint: its tensors and values, and what was found out about its bytes.

It comes from scans and from other jobs; the bytes themselves are read by `dcp.server.core.data`.
"""
