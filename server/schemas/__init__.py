"""What goes in and out as JSON: pydantic models, one module a resource.

How a list is asked for is in `queries`. The client has types of its own, because it needs no pydantic.
"""
