"""What goes in and out as JSON: pydantic models, one module a resource.

How a list is asked for is in `queries`. What is shown is declared in `dcp.server.records`, which the client
shares: it needs no pydantic.
"""
