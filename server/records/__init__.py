"""Records of the service, each declared once: JSON, client types and columns follow.

The package imports only the standard library, because the client needs the records without the service.
`dcp.server.catalog` uses the records, `dcp.server.database` makes the columns, `dcp.server.core.answers` the
JSON.
"""
