"""Durable ledger of jobs: each job completes once, even if its workers die.

`transitions`, `claims` and `failures` change jobs, with functions that take a `Connection` first;
`dcp.server.core.jobs.kind` defines the work of the phases.
"""
