"""Files below one folder of a POSIX file system: the store, and its open files.

The folders of a run are `dcp.storage.stores.opening`.
"""
