"""The demo as a command: the place it saves to, the sum at the end, the exit status."""

from __future__ import annotations

import shlex
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from dcp.demo.places import BucketPlace, DemoError, FolderPlace, Place
from dcp.demo.s3_server import S3Server, S3ServerError
from dcp.demo.story import Story


class _CannotBeginError(Exception):
    pass


def run_to_exit_status(root: Path | None, save_every: int, on_s3: bool = False, serve: bool = False) -> int:
    """Run the demo in ``root`` (made if need be, must be empty) or in a folder that is removed at the end.

    ``on_s3``: the checkpoints go to an S3 server that is started for it, and stopped at the end. ``serve``:
    if every check passed, the catalog stays up for browsers until Ctrl-C.
    Returns 0 if every check passed, 1 if not or if a job failed, 2 for wrong use, and 128 and the number of a
    signal that ended it, after all that it started has ended.
    """
    # As an exception, so that on the way out the training job is ended and the folder removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as until_end:
            folder = _folder(root, serve, until_end)
            return _tell(folder, root is not None, save_every, on_s3, serve, until_end)
    except (S3ServerError, _CannotBeginError) as error:
        print(f"dcp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndcp: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _folder(root: Path | None, serve: bool, until_end: ExitStack) -> Path:
    if find_spec("torch") is None:
        raise _CannotBeginError("the demo trains a model and needs torch: pip install 'dcphub[torch]'")
    if serve and find_spec("fastapi") is None:
        raise _CannotBeginError("the catalog needs more packages: pip install 'dcphub[server]'")
    if root is None:
        root = Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="dcp-demo-")))
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        raise _CannotBeginError(f"{root} is not empty; the demo wants a folder of its own")
    return root.resolve()


def _tell(root: Path, is_kept: bool, save_every: int, on_s3: bool, serve: bool, until_end: ExitStack) -> int:
    begun = time.monotonic()
    place: Place
    if on_s3:
        place = BucketPlace(until_end.enter_context(S3Server(root / "s3", bucket="dcp-demo")))
    else:
        place = FolderPlace(root / "checkpoints")
        place.folder.mkdir()
    story = Story(root, place, save_every, until_end)
    narrator = story.narrator
    try:
        story.tell()
        if not serve:
            story.end_catalog()
    except DemoError as error:
        narrator.check("the demo ran to its end", False, str(error))
    narrator.chapter("What this showed")
    seconds = time.monotonic() - begun
    if narrator.failed:
        for claim in narrator.failed:
            narrator.say(f"FAILED: {claim}")
        narrator.say(f"{len(narrator.failed)} of {narrator.claims} checks failed, after {seconds:.0f} s.")
        return 1
    narrator.say(
        """A job killed in the middle of a save loses the steps since its last checkpoint, and nothing else:
        the half-written save is not taken for one, and on the same number of ranks training continues as if
        nothing had happened, bit for bit. The same checkpoint loads on fewer and on more ranks, every bit of
        it. With a writer process even a job that is killed right after a step was copied gets that step
        committed. Stock torch reads what dcp wrote. A flipped bit is found, and the tensor named."""
    )
    narrator.say(f"All {narrator.claims} checks passed, in {seconds:.0f} s.")
    if serve:
        story.serve()
        return 1 if narrator.failed else 0
    if not is_kept:
        narrator.say("The folder is removed; dcp demo --root DIR keeps it, --serve shows it in a browser.")
    elif not on_s3:
        narrator.say(f"To look at it in a browser: cd {shlex.quote(str(root))} && dcp serve")
    return 0
