"""Executors: phases and tasks of jobs run in killable subprocesses, of this machine or of a Dask cluster.

The kind defines a phase or a task; `dcp.server.core.jobs.worker` claims it.
"""
