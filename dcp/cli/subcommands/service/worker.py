"""``dcp worker``: does the jobs of the service."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated

import typer

from dcp.cli.common import Debug, errors_as_lines
from dcp.cli.subcommands.service.serve import Config, read_settings

__all__ = ["command"]


def command(
    config: Config = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="Instead of the one of the settings.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="How many tasks run at a time [2].")
    ] = None,
    until_input_ends: Annotated[
        bool, typer.Option("--until-input-ends", hidden=True, help="End when standard input does.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Do the jobs of the service: conversions, verifications, scans and what else is in its queue.

    As many as one likes may run, on one machine or on several that share the database and the roots. Ends on
    SIGTERM and SIGINT; what it was doing is done by another one.
    """
    with errors_as_lines(debug=debug):
        settings = read_settings(config, database_url=database, concurrency=concurrency)
        from dcp.server.automation.schedules import built_in_schedules
        from dcp.server.jobs.worker import Worker
        from dcp.server.process.logs import configure_logs

        configure_logs(settings)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: stop.set())
        if until_input_ends:
            threading.Thread(target=_watch_input, args=(stop,), name="input", daemon=True).start()
        Worker(settings, schedules=built_in_schedules(settings)).run(stop)


def _watch_input(stop: threading.Event) -> None:
    # Nothing is ever sent; the end comes with the process that holds the other side, even if it was killed.
    # Straight from the descriptor: a thread that waits in sys.stdin would hold its lock when Python ends.
    while os.read(sys.stdin.fileno(), 4096):
        continue
    stop.set()
