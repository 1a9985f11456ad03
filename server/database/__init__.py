"""The catalog's database: tables, migrations, and the one way to read and write them.

What is in the tables, and what may become of it, is said by `dcp.server.catalog` and `dcp.server.core.jobs`.
"""
