"""Whether a service compares before it writes, found out by trying.

Many that speak S3 ignore what they do not know, and would let two writers both believe that they have won.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from typing import Final

from dcp.storage.errors import StorageError
from dcp.storage.stores.objects.client import ABSENT, Condition, Failure, ObjectClient
from dcp.storage.stores.objects.requests import Requests, ServiceError

__all__ = ["require_conditional_writes"]

logger = logging.getLogger(__name__)

_FOUND: Final[dict[tuple[str, bool], bool]] = {}
_lock = threading.Lock()


def _start_afresh() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the child does not have may be trying something out


os.register_at_fork(after_in_child=_start_afresh)


def require_conditional_writes(
    client: ObjectClient, requests: Requests, condition: Condition, prefix: str, url: str
) -> None:
    """Return if the service heeds conditions like ``condition``; raise `StorageError` if it does not.

    Tried once a process for every service and bucket of which it is not known, with an object of a unique key
    below ``prefix``, which is removed again.
    """
    creates = condition is ABSENT
    known = client.creates_conditionally if creates else client.replaces_conditionally
    if known is None:
        with _lock:
            key = client.identity, creates
            if key not in _FOUND:
                _FOUND[key] = _try(
                    client, requests, f"{prefix}.dcp-probe-{uuid.uuid4().hex}", creates=creates
                )
            known = _FOUND[key]
    if not known:
        what = "create a file only if it is absent" if creates else "compare before it replaces a file"
        raise StorageError(
            f"{url}: {client.place} cannot {what}, so two writers to one id could mix their checkpoints. If "
            'only one job ever writes there, pass storage_options={"conditional_writes": "off"}',
            path=url,
            op="publish",
        )


def _try(client: ObjectClient, requests: Requests, key: str, *, creates: bool) -> bool:
    """Write what must be refused, and see whether it is."""
    try:
        requests.run("put", key, lambda: client.put(key, b"1"))
        try:
            wrong: Condition = ABSENT if creates else '"00000000000000000000000000000000"'
            requests.run("put", key, lambda: client.put(key, b"2", wrong))
        except ServiceError as error:
            return error.kind is Failure.CONDITION
        return False
    finally:
        try:
            requests.run("delete", key, lambda: client.delete([key]))
        except (StorageError, ServiceError) as error:  # no permission to delete: commits need none
            logger.debug("%s stays behind: %s", key, error)
