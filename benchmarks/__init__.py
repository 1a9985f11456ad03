"""Ours and stock torch in turn, on the same data, beside the machine's limits: ``python -m benchmarks``."""
