"""The durable ledger of jobs: each is completed once, even if its workers die.

What can happen to a job is in `transitions`, `claims` and `failures`, all of whose functions take a
`Connection` first; what is done in its phases is in `dcp.server.core.jobs.kind`.
"""
