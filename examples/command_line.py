"""Command line options of all example scripts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return the common options; a script may add its own."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--checkpoints", type=Path, required=True)
    options.add_argument("--losses", type=Path, default=Path(os.devnull), help="append a JSON line per step")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--every", type=int, default=100, help="steps between saves")
    return options
