"""Each step between two revisions of the tables; a released one is never changed.

The tables as they are to be are `dcp.server.database.tables`.
"""
