"""Database of the catalog: tables, migrations and access.

`dcp.server.catalog` and `dcp.server.core.jobs` define the contents and their changes.
"""
