"""A real Dask cluster: a scheduler in this process, and two workers in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.forking import ensure_fork_server

__all__ = ["dask_cluster"]


@contextmanager
def dask_cluster(threads: int) -> Iterator[Any]:
    """Start workers from the fork server with ``threads`` threads each; a dead worker is restarted."""
    import dask.config
    import distributed  # imported here, since collecting tests does not need it

    ensure_fork_server()  # before Dask sets the modules to import
    make: Any = distributed.LocalCluster
    options = {"threads_per_worker": threads, "host": "127.0.0.1", "dashboard_address": None}
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        make(n_workers=2, processes=True, silence_logs=50, **options) as cluster,
    ):
        yield cluster
