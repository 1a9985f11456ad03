"""What the machine itself can do, and what a run takes of it: limits, memory, page cache, processes.

Nothing here knows of a checkpoint beyond its files.
"""
