"""What training waits for: asynchronous saves, training loops, staging from a device.

Saves that are waited for are in `benchmarks.rounds`.
"""
