"""Pickles: decode without running code, and write values as pickles.

`dcp.storage.formats.torch` interprets torch's pickles.
"""
