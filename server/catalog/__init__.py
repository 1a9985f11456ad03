"""Catalog: checkpoints, runs and labels as rows, through functions that take a `Connection` first.

The package opens no files and is independent of HTTP.
"""
