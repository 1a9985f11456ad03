"""The process that writes in the background: ``python -m dcp.background.main FD PID VERSION RANK
WORLD_SIZE TIMEOUT_SECONDS``.

A trainer starts it, and talks to it over the socket FD. It outlives the trainer PID: when that is gone, it
finishes the saves which it was given, and ends. SIGTERM, SIGINT and SIGHUP are ignored, and so are SIGUSR1
and SIGUSR2, by which schedulers give notice: they are meant for the training, which on a signal to all
processes may have its last save still to give. Nothing here imports torch before the process has lowered its
priority.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from dcp.background.link import Connection, watch_process
from dcp.version import __version__


def main(arguments: Sequence[str]) -> None:
    """Serve one trainer; returns when all is done."""
    fd, trainer, version, *others = arguments
    if version != __version__:  # the installed package has been replaced since
        sys.exit(f"the trainer runs dcphub {version}, but {__version__} is installed now: restart it")
    rank, world_size, timeout_seconds = int(others[0]), int(others[1]), float(others[2])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # so that training keeps its cores
    os.set_inheritable(int(fd), False)  # what custom storages start must not hold the connection
    peer = watch_process(int(trainer))
    if os.getppid() != int(trainer):  # it has ended since, and its id may be another's by now
        peer = os.eventfd(1)  # readable, as the pidfd of a process that has ended
    connection = Connection(socket.socket(fileno=int(fd)), peer)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"dcp writer process {os.getpid()} of rank {rank}: %(levelname)s: %(message)s",
    )
    gc.disable()  # what is imported stays: to look through it again and again is an eighth of the start
    from dcp.background.serving import WriterLoop

    gc.freeze()
    gc.enable()
    status = 1
    try:
        WriterLoop(connection, rank, world_size, timeout_seconds).run()
        status = 0
    except Exception:
        logging.getLogger(__name__).exception("an unexpected error ends this process")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # gloo and store threads are left as they are: tearing them down can only fail or hang
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
