"""Retention by the catalog: which checkpoints of which runs are kept, and what becomes of the others.

It decides, and remembers policies; the job that deletes is in `dcp.server.jobs.kinds`.
"""
