"""``dcp watch``: print or process the committed steps of a run as they appear, each once for a consumer."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import typer
from typer import Argument, Option

from dcp.cli import printing
from dcp.cli.common import EXIT_FINDINGS, FOLDERS, STORAGE, Call, fail, storage_options, unwinding_on_sigterm
from dcp.storage.errors import OptionError

if TYPE_CHECKING:
    from dcp.watching import Watch, WatchedStep

_END_SECONDS: Final = 10.0
"""Time for a command to end after SIGTERM."""

_PR_SET_PDEATHSIG: Final = 1
_STDERR: Final = 2


def watch(
    call: Call,
    run: str = Argument(..., help="Folder of a run: path or URL. May not exist yet."),
    exec_: str | None = Option(
        None,
        "--exec",
        metavar="COMMAND",
        help="Run this for each step, without a shell; {} becomes the checkpoint's path or URL, which is "
        "also in DCP_CHECKPOINT, beside DCP_STEP and DCP_SAVE_ID. Exit status 0 acknowledges the step.",
    ),
    consumer: str = Option("default", metavar="NAME", help="Each consumer gets each step once."),
    since: int = Option(0, min=0, metavar="STEP", help="Skip steps below."),
    once: bool = Option(False, "--once", help="End after the existing steps."),
    interval: float = Option(
        10.0, min=0.05, metavar="SECONDS", help="Pause between two looks, and two tries."
    ),
    tries: int = Option(3, min=1, help="Tries of a command for a step; then exit with 1."),
    cursor: str | None = Option(None, metavar="FOLDER", help="Store the cursor here instead of in the run."),
    folders: str = FOLDERS,
    options: str | None = STORAGE,
) -> None:
    """Print the committed steps of a run as they appear, or run a command for each step.

    Each consumer gets each step once. A step counts as done once printed, or once the command exits with 0;
    other steps are repeated on the next start. --json prints a line for each step. SIGINT and SIGTERM end the
    command too. A missing run is an error with --once.
    """
    words, status = _words(exec_), None
    from dcp.watching import watch

    try:
        given = storage_options(run, options)
        how: dict[str, Any] = {"consumer": consumer, "since": since, "once": once, "name": folders}
        how |= {"interval_seconds": interval, "cursor": cursor, "storage_options": given}
        with unwinding_on_sigterm():
            try:
                steps = watch(run, **how)
            except OptionError as error:
                raise typer.BadParameter(str(error)) from error
            with steps:
                for step in steps:
                    if words is not None:
                        status = _run(words, steps, step, tries, interval, json=call.json)
                    _tell(step, status, json=call.json)
                    if status:
                        raise typer.Exit(EXIT_FINDINGS)
                if not steps.has_found_run:  # --once
                    fail(f"{run} does not exist; omit --once to wait for the run")
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _words(command: str | None) -> list[str] | None:
    try:
        words = None if command is None else shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"{command!r}: {error}", param_hint="--exec") from error
    if words == []:
        raise typer.BadParameter("is empty", param_hint="--exec")
    return words


def _tell(step: WatchedStep, status: int | None, *, json: bool) -> None:
    if json:
        names = ("save_id", "committed_seconds", "metrics", "partial")
        shown = {"step": step.step, "checkpoint": step.checkpoint_id}
        shown |= {name: getattr(step, name) for name in names}
        printing.print_json(shown if status is None else shown | {"exit": status}, indent=None)
    elif status is None:
        print(printing.printable(step.checkpoint_id), flush=True)


def _run(
    words: list[str], steps: Watch, step: WatchedStep, tries: int, pause_seconds: float, *, json: bool
) -> int:
    """Return the exit status of the last try; 0 if the checkpoint was removed."""
    for number in range(1, tries + 1):
        status = _run_once(words, step, json=json)
        if status == 0:
            return 0
        shown = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        printing.error(f"{step.checkpoint_id}: the command {shown} (try {number} of {tries})")
        if not steps.is_committed(step):
            printing.error(
                f"{step.checkpoint_id} was deleted or replaced during the command; no further tries"
            )
            return 0
        if number < tries:
            time.sleep(pause_seconds)
    return status


def _run_once(words: list[str], step: WatchedStep, *, json: bool) -> int:
    environment = os.environ | {
        "DCP_CHECKPOINT": step.checkpoint_id,
        "DCP_STEP": str(step.step),
        "DCP_SAVE_ID": step.save_id,
    }
    arguments = [word.replace("{}", step.checkpoint_id) for word in words]
    libc = ctypes.CDLL(None)  # before the fork

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    # a killed watcher must not leave a running command behind
    output = _STDERR if json else None
    with subprocess.Popen(arguments, env=environment, stdout=output, preexec_fn=end_with_parent) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()  # no effect on an ended process
            raise
