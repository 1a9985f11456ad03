"""Telling a catalog about checkpoints, whatever becomes of the catalog.

The catalog itself is `dcp.server`.
"""
