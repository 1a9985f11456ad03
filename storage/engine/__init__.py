"""I/O scheduling: which bytes are written and read in which order, by which thread, into which memory.

`write` appends records to the data files of a save, `read` fills destinations from the ranges of an index.
Both are torch-free: memory is addressed, dtypes are codes.
"""
