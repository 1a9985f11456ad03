"""A real Dask cluster: a scheduler in this process, and two workers that are processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.forking import ensure_fork_server

__all__ = ["dask_cluster"]


@contextmanager
def dask_cluster(threads: int) -> Iterator[Any]:
    """With so many threads a worker; a worker that dies is started again. They come from the fork server."""
    import dask.config
    import distributed  # here, because to collect its tests takes neither

    ensure_fork_server()  # before Dask would tell it what to import
    make: Any = distributed.LocalCluster
    options = {"threads_per_worker": threads, "host": "127.0.0.1", "dashboard_address": None}
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        make(n_workers=2, processes=True, silence_logs=50, **options) as cluster,
    ):
        yield cluster
