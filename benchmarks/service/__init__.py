"""Benchmarks of the catalog and the service: scans, lists, downloads, start."""
