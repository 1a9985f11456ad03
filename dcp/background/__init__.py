"""Saving behind the training loop: sessions, futures, and writers in a thread or a process of their own.

The save itself is `dcp.saving`, the copy of the state `dcp.staging`; when to save is said by `dcp.manager`.
"""
