"""Benchmarks of asynchronous saves, training loops and staging from a device.

Synchronous saves are in `benchmarks.rounds`.
"""
