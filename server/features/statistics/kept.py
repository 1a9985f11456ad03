"""Statistics of a tensor, as a job has computed them."""

from __future__ import annotations

from dcp.server.catalog.verifications import get_statistics, statistics_of_tensor
from dcp.server.core.http.context import Service
from dcp.server.core.security.principal import Principal
from dcp.server.records.declaring import moment
from dcp.server.records.drawings import TensorStatistics

__all__ = ["kept_statistics"]


def kept_statistics(
    service: Service, checkpoint_id: int, fqn: str, caller: Principal
) -> TensorStatistics | None:
    """What a job has computed of one tensor; None if nothing, or if the checkpoint was replaced since.
    Raises MissingError."""
    with service.database.read() as connection:
        row = get_statistics(connection, checkpoint_id, caller.roots)
        if row is None or row.is_stale:
            return None
        found = statistics_of_tensor(connection, checkpoint_id, fqn)
    if found is None:
        return None
    return TensorStatistics(
        found["fqn"],
        found["dtype"],
        tuple(found["shape"]),
        found["statistics"],
        is_kept=True,
        computed_at=moment(row.created_seconds),
    )
