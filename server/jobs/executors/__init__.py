"""Where the phases and tasks of jobs run: in killable subprocesses, of this machine or of a Dask cluster.

What a phase or a task does is in `dcp.server.jobs.kinds`; who claims it, in `dcp.server.jobs.worker`.
"""
