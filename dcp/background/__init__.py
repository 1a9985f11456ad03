"""Asynchronous saves: sessions, futures, and background writers in a thread or a process.

`dcp.saving` does the save itself, `dcp.staging` copies the state, and `dcp.manager` decides when to save.
"""
