"""What operators watch: counters and durations of requests, and what the database says of the rest.

Whether the service is ready is `dcp.server.core.http.readiness`; the route is a feature's.
"""

from dcp.server.core.monitoring.exposition import CONTENT_TYPE, Monitoring, install

__all__ = ["CONTENT_TYPE", "Monitoring", "install"]
