"""Formats: parse files into an index, one module or folder per family. Torch-free.

`dcp.storage.engine` reads the bytes, `dcp.storage.stores` keeps the files.
"""
