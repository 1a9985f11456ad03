"""What operators watch: counters and durations of requests, and what the database says of the rest.

Whether the service is ready is `dcp.server.http.readiness`; the route is in `dcp.server.routes`.
"""

from dcp.server.monitoring.exposition import CONTENT_TYPE, Monitoring, install

__all__ = ["CONTENT_TYPE", "Monitoring", "install"]
