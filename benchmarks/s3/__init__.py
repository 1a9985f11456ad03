"""Saves and loads on an S3 server."""
