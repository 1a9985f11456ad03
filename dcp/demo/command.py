"""The demo as a command: options, the place it saves to, the sum at the end, the exit status."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

from dcp.demo.checks import Checks
from dcp.demo.jobs import DemoError
from dcp.demo.narration import Narrator
from dcp.demo.places import BucketPlace, FolderPlace, Place
from dcp.demo.s3_server import S3Server, S3ServerError
from dcp.demo.story import Story

__all__ = ["DEFAULT_SAVE_EVERY", "DESCRIPTION", "main", "run", "run_to_exit_status"]

DEFAULT_SAVE_EVERY = 10
DESCRIPTION = (
    "Train a small model, kill it in a save, resume it on other numbers of ranks, and check every claim."
)

_NEEDED_BYTES = 790 << 20
"""Twenty checkpoints of 31 MiB, converted and downloaded ones among them, and room to spare."""


def _sum_up(checks: Checks, narrator: Narrator, seconds: float, kept: str) -> int:
    narrator.chapter("What this showed")
    if checks.failed:
        for claim, reason in checks.failed:
            narrator.say(f"FAILED: {claim}{': ' if reason else ''}{reason}")
        narrator.say(f"{len(checks.failed)} of {len(checks.results)} checks failed, after {seconds:.0f} s.")
        return 1
    narrator.say(
        """A job killed in the middle of a save loses the steps since its last checkpoint, and nothing else:
        the half-written save is not taken for one, and on the same number of ranks training goes on as if
        nothing had happened, bit for bit. The same checkpoint loads on fewer and on more ranks, every bit of
        it. With a writer process even a job that is killed right after a step was copied gets that step
        committed. Stock torch reads what dcp wrote. A flipped bit is found, and the tensor named."""
    )
    narrator.say(f"All {len(checks.results)} checks passed, in {seconds:.0f} s. {kept}")
    return 0


def run(
    root: Path | None = None,
    *,
    save_every: int = DEFAULT_SAVE_EVERY,
    on_s3: bool = False,
    serve: bool = False,
) -> int:
    """Run the demo in ``root`` (made if need be, must be empty) or in a folder that is removed at the end.

    ``on_s3``: the checkpoints go to an S3 server that is started for it, and stopped at the end. ``serve``:
    if every check passed, the catalog stays up for browsers until Ctrl-C.
    Returns the exit status: 0 if every check passed, 1 if not or if a job failed, 2 for wrong use.
    """
    if find_spec("torch") is None:
        print("dcp: the demo trains a model and needs torch: pip install 'dcphub[torch]'", file=sys.stderr)
        return 2
    if serve and find_spec("fastapi") is None:
        print("dcp: the catalog needs more packages: pip install 'dcphub[server]'", file=sys.stderr)
        return 2
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            print(f"dcp: {root} is not empty; the demo wants a folder of its own", file=sys.stderr)
            return 2
        return _tell(root.resolve(), save_every, on_s3, serve, is_kept=True)
    with tempfile.TemporaryDirectory(prefix="dcp-demo-") as folder:
        return _tell(Path(folder).resolve(), save_every, on_s3, serve, is_kept=False)


def _tell(root: Path, save_every: int, on_s3: bool, serve: bool, *, is_kept: bool) -> int:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < _NEEDED_BYTES:
        print(
            f"dcp: {root} has {free_bytes >> 20} MiB free, the demo needs {_NEEDED_BYTES >> 20}: "
            "give it a folder with --root",
            file=sys.stderr,
        )
        return 2
    begun = time.monotonic()
    try:
        with _place(root, on_s3) as place, ExitStack() as until_end:
            story = Story(root, place, save_every, until_end)
            try:
                story.tell()
                if not serve:
                    story.end_catalog()
            except DemoError as error:
                story.narrator.check("the demo ran to its end", False, str(error))
            kept = _kept(root, on_s3, is_kept, place.checkpoint("run", 4 * save_every))
            status = _sum_up(story.checks, story.narrator, time.monotonic() - begun, "" if serve else kept)
            if serve and status == 0:
                _serve(root, story)
            return 1 if story.checks.failed else 0
    except S3ServerError as error:
        print(f"dcp: {error}", file=sys.stderr)
        return 2


def _kept(root: Path, on_s3: bool, is_kept: bool, newest: str) -> str:
    """What stays, and how to look at it."""
    look = "To look at all of it in a browser: make demo SERVE=1, or dcp demo --serve."
    if not is_kept:
        return f"The folder is removed; --root DIR keeps it. {look}"
    if on_s3:
        return f"The S3 server stops and its data goes; logs and results stay in {root}. {look}"
    return (
        f"Everything is kept. To look at it in a browser: cd {shlex.quote(str(root))} && dcp serve; without "
        f"one, for instance: dcp show {shlex.quote(newest)}"
    )


def _serve(root: Path, story: Story) -> None:
    """The catalog of what was trained, until Ctrl-C or SIGTERM."""
    if story.service is None:
        return
    story.narrator.chapter("Look at it")
    story.narrator.say(f"The catalog is at {story.service.url}/ until Ctrl-C.")
    try:
        status = story.service.wait()
    except KeyboardInterrupt:
        story.end_catalog()
        story.narrator.say("It is stopped.")
    else:
        story.narrator.say(f"It ended by itself, with exit status {status}; its log is in {root / 'logs'}.")


@contextmanager
def _place(root: Path, on_s3: bool) -> Iterator[Place]:
    if not on_s3:
        folder = root / "checkpoints"
        folder.mkdir()
        yield FolderPlace(folder)
        return
    with S3Server(root / "s3", bucket="dcp-demo") as server:
        yield BucketPlace(server)


def run_to_exit_status(root: Path | None, save_every: int, on_s3: bool = False, serve: bool = False) -> int:
    """`run` for a command line: also what ends it from outside becomes an exit status, after cleaning up."""
    # As an exception, so that on the way out the training job is ended and the folder removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(root, save_every=save_every, on_s3=on_s3, serve=serve)
    except KeyboardInterrupt:
        print("\ndcp: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def main() -> int:
    """The command line of ``python -m dcp.demo``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dcp.demo", description=DESCRIPTION)
    parser.add_argument("--root", type=Path, help="keep everything in this folder, which must be empty")
    parser.add_argument(
        "--save-every",
        type=int,
        default=DEFAULT_SAVE_EVERY,
        help="steps between saves; a run has four saves (default: %(default)s)",
    )
    parser.add_argument(
        "--s3", action="store_true", help="save to an S3 server, which is started here (SeaweedFS)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="keep the catalog up at the end, for a browser, until Ctrl-C"
    )
    options = parser.parse_args()
    if options.save_every < 1:
        parser.error("--save-every must be 1 or more")
    return run_to_exit_status(options.root, options.save_every, options.s3, options.serve)
