"""Routes of jobs: submit, follow, cancel and retry, and verification, which is a job with a route of its own.

The work is done by workers, `dcp.server.jobs`.
"""
