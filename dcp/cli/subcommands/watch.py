"""``dcp watch``: the committed steps of a run as they come, each once for a consumer."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    EXIT_FINDINGS,
    Debug,
    Json,
    Options,
    errors_as_lines,
    print_error,
    print_json_line,
    printable,
    storage_options,
    unwinding_on_sigterm,
)

if TYPE_CHECKING:
    from dcp.watching import Watch, WatchedStep

__all__ = ["command"]

_END_SECONDS: Final = 10.0
"""The time that a command may take to end by SIGTERM."""

_PR_SET_PDEATHSIG: Final = 1
_STDERR: Final = 2


def command(
    run: Annotated[str, typer.Argument(help="The folder of a run: path or URL. It need not be there yet.")],
    exec_: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="Run this for each step, without a shell; {} becomes the checkpoint's path or URL, which is "
            "also in DCP_CHECKPOINT, beside DCP_STEP and DCP_SAVE_ID. Exit status 0 acknowledges the step.",
        ),
    ] = None,
    consumer: Annotated[
        str, typer.Option(metavar="NAME", help="Whose steps these are: every name is given all of them once.")
    ] = "default",
    since: Annotated[int, typer.Option(min=0, metavar="STEP", help="No steps below this one.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="End after the steps that are there.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.05, metavar="SECONDS", help="The pause between two looks, and two tries.")
    ] = 10.0,
    tries: Annotated[
        int, typer.Option(min=1, help="How often a command is tried for a step before this ends with 1.")
    ] = 3,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where what was acknowledged is kept, if not in the run."),
    ] = None,
    folders: Annotated[
        str, typer.Option(metavar="FORMAT", help="How the run names the folders of its steps.")
    ] = "step-{step:08d}",
    options: Options = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the committed steps of a run as they come, or run a command for each, and acknowledge it.

    A step is printed or given to the command once for each consumer; one that was not acknowledged, because
    the command failed or this was killed, is given again to whoever continues. With --json a line of JSON a
    step. SIGINT and SIGTERM end it, and the command with it. A run that is not there fails with --once.
    """
    words = _words(exec_)
    try:
        with errors_as_lines(debug=debug), unwinding_on_sigterm():
            steps = _steps(
                run,
                consumer=consumer,
                since=since,
                once=once,
                interval_seconds=interval,
                cursor=cursor,
                name=folders,
                storage_options=storage_options(run, options),
            )
            with steps:
                for step in steps:
                    status = 0 if words is None else _run(words, steps, step, tries, interval, json=json)
                    _tell(step, status if words is not None else None, json=json)
                    if status:
                        raise typer.Exit(EXIT_FINDINGS)
                if not steps.has_found_run:  # --once
                    print_error(f"{run} is not there: --once has no steps to give")
                    raise typer.Exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _steps(run: str, **how: Any) -> Watch:
    """Call `dcp.watch`; a usage error for what it refuses."""
    from dcp.storage.errors import OptionError  # here, because a usage message must not wait for numpy
    from dcp.watching import watch

    try:
        return watch(run, **how)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


def _words(command: str | None) -> list[str] | None:
    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"{command!r}: {error}", param_hint="--exec") from error
    if not words:
        raise typer.BadParameter("is empty", param_hint="--exec")
    return words


def _tell(step: WatchedStep, status: int | None, *, json: bool) -> None:
    if json:
        shown: dict[str, Any] = {
            "step": step.step,
            "checkpoint": step.checkpoint_id,
            "save_id": step.save_id,
            "committed_seconds": step.committed_seconds,
            "metrics": step.metrics,
            "partial": step.partial,
        }
        print_json_line(shown if status is None else shown | {"exit": status})
    elif status is None:
        print(printable(step.checkpoint_id), flush=True)


def _run(
    words: list[str], steps: Watch, step: WatchedStep, tries: int, pause_seconds: float, *, json: bool
) -> int:
    """Return the exit status of the command's last try; 0 too where the checkpoint is not there any more."""
    for number in range(1, tries + 1):
        status = _run_once(words, step, json=json)
        if status == 0:
            return 0
        shown = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        print_error(f"{step.checkpoint_id}: the command {shown} (try {number} of {tries})")
        if not steps.is_committed(step):
            print_error(f"{step.checkpoint_id} was deleted or saved anew meanwhile, and is not tried again")
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

    # a watcher that is killed must not leave it at work beside that of the next one
    with subprocess.Popen(
        arguments,
        env=environment,
        stdout=_STDERR if json else None,
        preexec_fn=end_with_parent,
    ) as process:
        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
