"""What operators watch: counters and durations of requests, and what the database says of the rest."""

from dcp.server.monitoring.exposition import CONTENT_TYPE, Monitoring, install

__all__ = ["CONTENT_TYPE", "Monitoring", "install"]
