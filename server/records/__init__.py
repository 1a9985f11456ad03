"""Records that the service returns, each declared once: JSON, the client's type and columns follow.

Nothing here imports anything but the standard library, because the client does with httpx alone. What is done
with records is in `dcp.server.catalog`; their columns are made in `dcp.server.database`, their JSON in
`dcp.server.core.answers`.
"""
