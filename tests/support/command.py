"""The command line, run in the test process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from dcp.cli.app import app

__all__ = ["Outcome", "run"]


@dataclass(frozen=True)
class Outcome:
    """The output and exit status of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Parse standard output."""
        return json.loads(self.out)


def run(*arguments: object) -> Outcome:
    """Run ``dcp`` with ``arguments`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app(args=[str(argument) for argument in arguments], prog_name="dcp")
        except SystemExit as exit_:
            status = exit_.code
    assert isinstance(status, int | None)
    return Outcome(status or 0, out.getvalue(), err.getvalue())
