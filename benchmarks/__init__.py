"""Benchmarks of dcphub beside stock torch and the limits of the machine: ``python -m benchmarks``.

This package has the rounds, the workloads and the table; `machine` measures the machine itself. It is not
installed.
"""
