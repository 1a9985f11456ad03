"""The catalog and the service under load: scans, lists, downloads, its start.

What training waits for is measured elsewhere.
"""
