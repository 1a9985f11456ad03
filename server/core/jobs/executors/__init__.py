"""Executors: phases and tasks of jobs in killable subprocesses, on this machine or a Dask cluster.

The kind defines phases and tasks; `dcp.server.core.jobs.worker` claims them.
"""
