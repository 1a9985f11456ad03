"""Migration steps between revisions of the tables. A released step never changes.

`dcp.server.database.tables` declares the current tables.
"""
