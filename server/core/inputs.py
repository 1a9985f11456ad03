"""Types of values that come in: see `dcp.server.catalog.inputs`."""

from dcp.server.catalog.inputs import (
    MAX_ID,
    NAME_PATTERN,
    Finite,
    Name,
    OneLine,
    Plain,
    Query,
    Request,
    Text,
    Time,
    is_clean,
)

__all__ = [
    "MAX_ID",
    "NAME_PATTERN",
    "Finite",
    "Name",
    "OneLine",
    "Plain",
    "Query",
    "Request",
    "Text",
    "Time",
    "is_clean",
]
