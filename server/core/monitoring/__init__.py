"""Metrics for operators: counters and durations of requests, and samples of the database.

Whether the service is ready is `dcp.server.core.http.readiness`; the route is a feature's.
"""

from dcp.server.core.monitoring.exposition import CONTENT_TYPE, Monitoring, install

__all__ = ["CONTENT_TYPE", "Monitoring", "install"]
