"""The records of the catalog, each declared once: columns, JSON and the client's type follow from there.

Nothing here imports anything but the standard library, because the client does with httpx alone. What is done
with records is in `dcp.server.catalog`; their columns are made in `dcp.server.database`, their JSON in
`dcp.server.schemas`.
"""
