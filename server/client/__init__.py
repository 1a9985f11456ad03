"""The typed client of the service."""
