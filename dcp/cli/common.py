"""Common parts of the commands: options, exit statuses, how errors, tables, sizes and times are shown."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import math
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Annotated, Any, Final, NoReturn, TypeAlias

import typer

from dcp.calls.plain_errors import whole_tracebacks
from dcp.storage.errors import CheckpointError

__all__ = [
    "EXIT_FAILURE",
    "EXIT_FINDINGS",
    "OPTIONS_VARIABLE",
    "Debug",
    "Exclude",
    "Json",
    "Only",
    "Options",
    "Source",
    "describe_bytes",
    "describe_shape",
    "describe_time",
    "describe_value",
    "errors_as_lines",
    "has_no_reader",
    "print_error",
    "print_json",
    "print_json_line",
    "printable",
    "storage_options",
    "unwinding_on_sigterm",
]

EXIT_FINDINGS: Final = 1
EXIT_FAILURE: Final = 3

OPTIONS_VARIABLE: Final = "DCP_STORAGE_OPTIONS"

_RETRY_SECONDS: Final = 10.0
_MAX_JSON_ELEMENTS: Final = 1_000_000

Options: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--storage-options",
        metavar="JSON",
        help="Options of a URL's file system, as a JSON object such as "
        '\'{"endpoint_url": "https://..."}\'. Rather set DCP_STORAGE_OPTIONS to it, where it has secrets, '
        "which other users can see on a command line; or what the file system reads itself, such as AWS_*.",
    ),
]
Source: TypeAlias = Annotated[str, typer.Argument(help="A checkpoint of any format: path or URL.")]
Only: TypeAlias = Annotated[
    list[str] | None, typer.Option("--only", metavar="GLOB", help="These names, and those below.")
]
Exclude: TypeAlias = Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")


def storage_options(uri: str, given: str | None) -> dict[str, Any] | None:
    """Return options to open ``uri`` with: those ``given``, or those of the environment, which are for
    URLs only.

    Of an object store that does not answer, the command line waits less long than a training run. Raises
    `CheckpointError`, which shows nothing of the options, for what is not a JSON object.
    """
    from dcp.storage.stores import type_of_place  # here, because a usage message must not wait for it

    is_remote = "://" in uri and type_of_place(uri).takes_options
    source, text = "--storage-options", given
    if text is None and is_remote:
        source, text = OPTIONS_VARIABLE, os.environ.get(OPTIONS_VARIABLE)
    if not text:
        return {"retry_seconds": _RETRY_SECONDS} if is_remote else None
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise CheckpointError(f'{source} is not a JSON object, such as {{"anon": true}}') from None
    return {"retry_seconds": _RETRY_SECONDS, **options} if is_remote else options


@contextlib.contextmanager
def errors_as_lines(*, debug: bool) -> Iterator[None]:
    """Turn any error into one line on stderr and exit status 3; with ``debug``, into its traceback and 3.

    An error that is not of our making is a bug, and must not end with Python's status 1: that means findings.
    """
    requests = logging.getLogger("dcp.storage.stores.objects")
    level = requests.level
    if not debug:
        requests.setLevel(logging.ERROR)  # what was tried again and again is in the error that it ends in
    try:
        with whole_tracebacks() if debug else contextlib.nullcontext():
            yield
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and has_no_reader():
            raise  # as with `| head`, and nothing to report
        if debug:
            traceback.print_exception(error)
        elif isinstance(error, CheckpointError | OSError):
            print_error(str(error))
        elif isinstance(error, ModuleNotFoundError) and (extra := _extra_with(error.name)):
            print_error(f"this needs {error.name}: pip install 'dcphub[{extra}]'")
        else:
            print_error(
                f"internal error: {type(error).__name__}: {error} (--debug shows where; please report it)"
            )
        raise typer.Exit(EXIT_FAILURE) from error
    finally:
        requests.setLevel(level)


def _extra_with(module: str | None) -> str | None:
    """Return the extra that brings the package that such a module is in; None where none does."""
    from importlib.metadata import PackageNotFoundError, requires

    package = (module or "").partition(".")[0].replace("_", "-")
    pattern = re.compile(rf"{re.escape(package)}(?![\w.-]).*extra == [\"'](?P<extra>[\w-]+)")
    with contextlib.suppress(PackageNotFoundError):  # of a checkout that is not installed
        for requirement in requires("dcphub") or ():
            if match := pattern.match(requirement):
                return match["extra"]
    return None


def has_no_reader() -> bool:
    """Return whether the other end of standard output is closed: other pipes break, too."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:  # no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextlib.contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block by an exception, as SIGINT does: processes end, and files are cleared up."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def print_error(message: str) -> None:
    """Print one line on stderr."""
    print(f"dcp: {printable(' '.join(message.split()))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print ``value`` (plain data, data classes) as JSON on stdout; what JSON lacks (bytes, nan) as its
    repr."""
    plain = _jsonable(value)
    try:
        print(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))
    except UnicodeEncodeError:  # of names with halves of surrogate pairs, or on a terminal of few characters
        print(json.dumps(plain, indent=2, allow_nan=False))


def print_json_line(value: Any) -> None:
    """Print the same as one line, at once: for output without an end."""
    print(json.dumps(_jsonable(value), ensure_ascii=False, allow_nan=False), flush=True)


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {item.name: _jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if hasattr(value, "tolist") and value.size <= _MAX_JSON_ELEMENTS:  # of numpy
        return _jsonable(value.tolist())
    from dcp.storage.formats.torch.python_values import value_text

    return value_text(value)


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped: names come from files, and must not steer the
    terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def describe_bytes(count: int | None) -> str:
    """Return a size to read: three digits and a binary unit; - where it is not known."""
    if count is None:
        return "-"
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if value < 999.5 or unit == _UNITS[-1]:
            break
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def describe_shape(shape: Sequence[int]) -> str:
    """Return ``64x32``; ``scalar`` without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def describe_value(value: object, most: int) -> str:
    """Return a value that is no tensor in at most so many characters."""
    from dcp.storage.formats.torch.python_values import value_text

    text = value_text(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def describe_time(seconds: float | None) -> str:
    """Return seconds since the epoch as local time; - where it is not known, or in no year that a calendar
    has."""
    if seconds is None:
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"
