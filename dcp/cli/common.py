"""Common parts of the commands: options, output as text or JSON, errors as lines, exit statuses.

Commands import modules with numpy inside functions, to keep help and usage errors fast.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import typer
from typer import Argument, Option

from dcp.calls.plain_errors import whole_tracebacks
from dcp.cli import printing
from dcp.storage.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")
Strings: TypeAlias = list[str] | None

EXIT_FINDINGS: Final = 1
EXIT_FAILURE: Final = 3

_OPTIONS_VARIABLE: Final = "DCP_STORAGE_OPTIONS"
_RETRY_SECONDS: Final = 10.0

SOURCE: Final = Argument(..., help="A checkpoint of any format: path or URL.")
URIS: Final = Argument(..., metavar="URI...", help="Checkpoints: paths or URLs.")
ONLY: Final = Option(None, metavar="GLOB", help="Only these names, and names below.")
EXCLUDE: Final = Option(None, metavar="GLOB", help="Leave out these names.")
TOP: Final = Option(None, metavar="N", min=1, help="Show the first N rows only.")
FOLDERS: Final = Option("step-{step:08d}", metavar="FORMAT", help="Format of the run's folder names.")
STORAGE: Final = Option(
    None,
    "--storage-options",
    metavar="JSON",
    help="Options of a URL's file system, as a JSON object such as "
    '\'{"endpoint_url": "https://..."}\'. Other users can see a command line: pass secrets in the '
    "variable DCP_STORAGE_OPTIONS instead, or in variables of the file system, such as AWS_*.",
)
_JSON: Final = Option(False, "--json", help="Print JSON instead of a table.")
_DEBUG: Final = Option(False, "--debug", help="Show the traceback of an error.")


@dataclass(frozen=True, slots=True)
class Answer:
    """A command's result: ``data`` for --json, printed by ``show`` otherwise, and the exit status."""

    data: Any
    show: Callable[[], object] = lambda: None
    status: int = 0


@dataclass(slots=True)
class Call:
    """One call of a command. ``has_failed`` is set after an error for one of several checkpoints."""

    json: bool
    debug: bool
    has_failed: bool = False

    def each(self, places: Iterable[T], work: Callable[[T], R], show: Callable[[R], object]) -> list[R]:
        """Return the results of ``work`` for all ``places``; show each unless --json is given.

        Errors are printed, and the command continues with the remaining places.
        """
        found = []
        for place in places:
            try:
                with errors_as_lines(debug=self.debug):
                    found.append(work(place))
            except typer.Exit:
                self.has_failed = True
            else:
                if not self.json:
                    show(found[-1])
        return found


def as_command(run: Callable[..., Answer | None]) -> Callable[..., None]:
    """Make a command of ``run``, with --debug, and with --json if it returns an `Answer` or takes ``call``.

    A parameter with a function as default is replaced by the function's options and result.
    """
    own = inspect.signature(run).parameters
    groups = {name: one.default for name, one in own.items() if inspect.isfunction(one.default)}
    parameters: list[inspect.Parameter] = []
    for name, one in own.items():
        inner = inspect.signature(groups[name]).parameters if name in groups else {name: one}
        parameters += [inner[name] for name in inner if name != "call"]
    kind = inspect.Parameter.KEYWORD_ONLY
    if "call" in own or "Answer" in run.__annotations__["return"]:
        parameters.append(inspect.Parameter("json", kind, default=_JSON, annotation=bool))
    parameters.append(inspect.Parameter("debug", kind, default=_DEBUG, annotation=bool))

    @wraps(run)
    def command(*, debug: bool, json: bool = False, **given: Any) -> None:
        call = Call(json, debug)
        with errors_as_lines(debug=debug):
            for name, group in groups.items():
                given[name] = group(**{one: given.pop(one) for one in inspect.signature(group).parameters})
            answer = run(**given, **({"call": call} if "call" in own else {}))
            if answer is None:
                return
            if json:
                printing.print_json(answer.data)
            else:
                answer.show()
            if status := EXIT_FAILURE if call.has_failed else answer.status:
                raise typer.Exit(status)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=kind) for one in parameters]
    )
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def storage_options(uri: str, given: str | None) -> dict[str, Any] | None:
    """Return the options to open ``uri``: ``given``, or from the environment for a URL.

    Timeouts of object stores are shorter than in training. Raises `CheckpointError`, without showing the
    options, for text that is not a JSON object.
    """
    from dcp.storage.stores import type_of_place

    is_remote = "://" in uri and type_of_place(uri).takes_options
    source, text = "--storage-options", given
    if text is None and is_remote:
        source, text = _OPTIONS_VARIABLE, os.environ.get(_OPTIONS_VARIABLE)
    defaults = {"retry_seconds": _RETRY_SECONDS} if is_remote else {}
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise CheckpointError(f'{source}: expected a JSON object such as {{"anon": true}}') from None
    return {**defaults, **options} or None


def sort_key(option: str, keys: Mapping[str, Callable[[T], Any]]) -> Callable[[T], Any] | None:
    """Return the key of ``--sort``, if given; invalid keys are usage errors."""
    if option and option not in keys:
        raise typer.BadParameter(f"{option!r} is not one of {', '.join(keys)}", param_hint="--sort")
    return keys.get(option)


def fail(message: str) -> NoReturn:
    """Print an error and end with the status of failures."""
    printing.error(message)
    raise typer.Exit(EXIT_FAILURE)


@contextlib.contextmanager
def errors_as_lines(*, debug: bool) -> Iterator[None]:
    """Print any error as one line on stderr, or with ``debug`` as a traceback, and exit with 3.

    Unexpected errors must not exit with Python's status 1, which means findings.
    """
    requests = logging.getLogger("dcp.storage.stores.objects")
    level = requests.level
    if not debug:
        requests.setLevel(logging.ERROR)  # the final error includes the retries
    try:
        with whole_tracebacks() if debug else contextlib.nullcontext():
            yield
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and has_no_reader():
            raise  # the pipe was closed, as by `| head`: no error
        if debug:
            traceback.print_exception(error)
        else:
            printing.error(_as_line(error))
        raise typer.Exit(EXIT_FAILURE) from error
    finally:
        requests.setLevel(level)


def _as_line(error: Exception) -> str:
    if isinstance(error, CheckpointError | OSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_with(error.name)):
        return f"this command needs {error.name}: pip install 'dcphub[{extra}]'"
    return f"internal error: {type(error).__name__}: {error} (--debug prints the traceback; please report it)"


def _extra_with(module: str | None) -> str | None:
    """Return the extra that installs a missing module's package, or None."""
    from importlib.metadata import PackageNotFoundError, requires

    package = (module or "").partition(".")[0].replace("_", "-")
    pattern = re.compile(rf"{re.escape(package)}(?![\w.-]).*extra == [\"'](?P<extra>[\w-]+)")
    with contextlib.suppress(PackageNotFoundError):  # a checkout that is not installed has no metadata
        return next(
            (found["extra"] for one in requires("dcphub") or () if (found := pattern.match(one))), None
        )
    return None


def has_no_reader() -> bool:
    """Test whether the reader of standard output has closed the pipe."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:  # standard output is not a file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Convert SIGTERM to an exception in this block, as for SIGINT, so that processes and files are cleaned
    up.
    """

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
