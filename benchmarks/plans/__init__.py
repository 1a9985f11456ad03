"""Benchmarks of planning saves and loads, first and repeated."""
