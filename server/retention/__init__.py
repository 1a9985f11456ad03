"""Retention by the catalog: which checkpoints of which runs are kept, and what becomes of the others."""
