"""Where the phases and tasks of jobs run: in killable subprocesses, of this machine or of a Dask cluster.

What a phase or a task does is its kind's; who claims it, in `dcp.server.core.jobs.worker`.
"""
