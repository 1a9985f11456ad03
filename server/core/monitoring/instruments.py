"""The counters and histograms that a process of the API keeps itself.

Everything else is read from the database when it is asked for (`state.py`), because it has to be right
whichever process answers, and for workers that listen on no port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

__all__ = ["Instruments"]

_REQUEST_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STATEMENT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10)


@dataclass(frozen=True)
class Instruments:
    """What is counted where it happens; in a registry of its own, so that two services do not share it.

    ``route`` is the template of the path (``/api/v1/checkpoints/{checkpoint_id}``), or "(none)".
    """

    registry: CollectorRegistry
    requests: Counter
    request_seconds: Histogram
    requests_in_progress: Gauge
    response_bytes: Counter
    responses_cut: Counter
    statement_seconds: Histogram
    database_errors: Counter

    @classmethod
    def create(cls) -> Instruments:
        """All at nought."""
        # A series more for each counter, which Prometheus has no use for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        return cls(
            registry=registry,
            requests=Counter(
                "dcp_http_requests",
                "Requests answered, by method, route and status",
                ["method", "route", "status"],
                registry=registry,
            ),
            request_seconds=Histogram(
                "dcp_http_request_seconds",
                "From the request to the first byte of the answer",
                ["method", "route"],
                buckets=_REQUEST_SECONDS,
                registry=registry,
            ),
            requests_in_progress=Gauge(
                "dcp_http_requests_in_progress",
                "Requests whose answer has not ended, downloads and event streams among them",
                registry=registry,
                multiprocess_mode="livesum",
            ),
            response_bytes=Counter(
                "dcp_http_response_bytes", "Bytes of bodies sent", ["route"], registry=registry
            ),
            responses_cut=Counter(
                "dcp_http_responses_cut",
                "Answers that ended before their last byte: a client that left, or a source found damaged",
                registry=registry,
            ),
            statement_seconds=Histogram(
                "dcp_database_statement_seconds",
                "Time in the database, of single statements of the API, by what they do",
                ["access"],
                buckets=_STATEMENT_SECONDS,
                registry=registry,
            ),
            database_errors=Counter(
                "dcp_database_errors",
                "Statements and connections that failed because the database was away, locked or full",
                registry=registry,
            ),
        )
