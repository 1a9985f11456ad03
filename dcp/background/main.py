"""Writer process: ``python -m dcp.background.main FD PID VERSION RANK WORLD_SIZE TIMEOUT_SECONDS``.

A trainer starts the process and communicates over the socket FD. After the end of the trainer PID, the
process finishes its saves and exits. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are ignored, because
schedulers send them to all processes while the trainer may have a last save. The process lowers its priority
before it imports torch.
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
    """Serve one trainer until all saves are done."""
    fd, trainer, version, *others = arguments
    if version != __version__:  # the installed package has been replaced since
        sys.exit(f"the trainer runs dcphub {version}, but {__version__} is installed now: restart it")
    rank, world_size, timeout_seconds = int(others[0]), int(others[1]), float(others[2])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training has priority
    os.set_inheritable(int(fd), False)  # subprocesses of custom storages must not inherit the connection
    peer = watch_process(int(trainer))
    if os.getppid() != int(trainer):  # the trainer has ended; its id may be reused
        peer = os.eventfd(1)  # readable, like the pidfd of an ended process
    connection = Connection(socket.socket(fileno=int(fd)), peer)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"dcp writer process {os.getpid()} of rank {rank}: %(levelname)s: %(message)s",
    )
    gc.disable()  # collections during the imports take an eighth of the start
    from dcp.background.serving import WriterLoop

    gc.freeze()
    gc.enable()
    status = 1
    try:
        WriterLoop(connection, rank, world_size, timeout_seconds).run()
        status = 0
    except Exception:
        logging.getLogger(__name__).exception("unexpected error: the writer process exits")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # gloo and store threads keep running: stopping them could fail or hang
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
