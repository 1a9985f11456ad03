"""Limits of the machine and the use of its resources: bandwidth, memory, page cache, processes.

Only the files of a checkpoint are known here.
"""
