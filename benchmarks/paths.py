"""Count the functions and modules of this package that the main operations enter, as JSON.

    python benchmarks/paths.py [FOLDER]

The second call of each, with three entries, on one rank. A function counts once, however often it is called.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import dcp

HOME = Path(dcp.__file__).resolve().parent.parent
OURS = tuple(f"{HOME}/{folder}/" for folder in ("dcp", "storage", "planners"))


def entered(operation: Callable[[int], object]) -> tuple[int, int]:
    """Count the (functions, modules) that ``operation`` enters, in all threads."""
    operation(0)
    seen = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = os.path.realpath(frame.f_code.co_filename)
        if event == "call" and path.startswith(OURS):
            seen.add((path, frame.f_code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        operation(1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(seen), len({path for path, _ in seen})


def main() -> None:
    """Print the counts by operation."""
    state = {"model": {"w": torch.randn(64, 64), "b": torch.randn(64)}, "step": 3}
    into = {"model": {"w": torch.zeros(64, 64), "b": torch.zeros(64)}, "step": 0}
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as top:
        manager = dcp.CheckpointManager(f"{top}/run", mode="sync", no_dist=True)
        operations: dict[str, Callable[[int], Any]] = {
            "save": lambda at: dcp.save(state, checkpoint_id=f"{top}/save{at}", no_dist=True),
            "load": lambda at: dcp.load(into, checkpoint_id=f"{top}/save0", no_dist=True),
            "convert": lambda at: dcp.convert(
                f"{top}/save0", f"{top}/{at}.pt", to="torch", executor="inline"
            ),
            "manager.save": lambda at: manager.save(at, state),
            "manager.restore": lambda at: manager.restore(into),
        }
        found = {name: entered(operation) for name, operation in operations.items()}
        manager.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
