"""The catalog and the service under load."""
