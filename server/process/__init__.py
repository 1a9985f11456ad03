"""The processes of the service: uvicorn, the worker beside it, their logs and their end.

What happens in one of them is the application (`dcp.server.app`) or a worker (`dcp.server.core.jobs.worker`).
"""
