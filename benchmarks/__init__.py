"""Ours and stock torch in turn, on the same data, beside the machine's limits: ``python -m benchmarks``.

Here are rounds, workloads and the table. Folders have subjects of their own; in `machine` is what is measured
of the machine itself. Nothing of it is installed.
"""
