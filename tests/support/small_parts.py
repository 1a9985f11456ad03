"""The service's own kinds of jobs, with conversions in batches of 1 MiB: many tasks without much to write.

For processes of their own (`tests.support.small_parts_worker`): to import it changes all conversions.
"""

from __future__ import annotations

from dcp.conversion import driver
from dcp.conversion.copying import tasks
from dcp.server.jobs.kinds import KINDS

__all__ = ["KINDS"]

driver.BATCH_BYTES = tasks.TASK_BYTES = 1 << 20  # type: ignore[misc]  # here only
