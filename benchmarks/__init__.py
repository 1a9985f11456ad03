"""Ours and stock torch in turn, on the same data, beside the machine's limits: ``python -m benchmarks``.

Here are rounds, workloads and the table; folders have subjects of their own. Nothing of it is installed.
"""
