"""The catalog: checkpoints, runs and labels as rows, by functions that take a `Connection` first.

Nothing here opens a file or knows of HTTP.
"""
