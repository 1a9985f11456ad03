"""POSIX store: files below a folder, and open files.

`dcp.storage.stores.opening` lists the folders of a run.
"""
