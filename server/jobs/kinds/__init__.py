"""What jobs there are, one module each; `KINDS` has them by name.

What several of them need is in `shared`; what a kind is, in `dcp.server.jobs.kind`.
"""

from __future__ import annotations

from typing import Any, Final

from dcp.server.jobs.kind import Kind
from dcp.server.jobs.kinds.convert import Convert
from dcp.server.jobs.kinds.delete import Delete
from dcp.server.jobs.kinds.diff import Diff
from dcp.server.jobs.kinds.purge import Purge
from dcp.server.jobs.kinds.retention import Retention
from dcp.server.jobs.kinds.scan import Scan
from dcp.server.jobs.kinds.stats import Stats
from dcp.server.jobs.kinds.verify import Verify

__all__ = ["KINDS"]

KINDS: Final[dict[str, Kind[Any]]] = {
    kind.name: kind for kind in (Convert(), Delete(), Diff(), Purge(), Retention(), Scan(), Stats(), Verify())
}
