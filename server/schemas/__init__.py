"""What goes in and out as JSON: pydantic models, one module a resource."""
