"""Limits on the number of functions and modules in the main operations, which a reader must follow."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch

import dcp
from tests.support.app import running_app
from tests.support.kind_runs import KindRuns
from tests.support.programs import run_program
from tests.support.suite import ROOT

MOST = {"save": (236, 42), "load": (248, 45), "convert": (296, 41)}
MOST |= {"manager.save": (263, 49), "manager.restore": (304, 52)}
"""Most (functions, modules) of each operation, as `benchmarks/paths.py` counts; they may only decrease."""


def test_the_main_operations_use_few_functions(tmp_path: Path) -> None:
    """save, load, convert and the manager stay within their limits of functions and modules."""
    done = run_program(str(ROOT / "benchmarks" / "paths.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(n <= most for name in MOST for n, most in zip(found[name], MOST[name], strict=True)), found


MOST_OF_SERVICE = {"list": 8, "page": 6, "conversion": 23}
"""Most service modules of each request, besides those of all requests; they may only decrease."""
SERVER = os.path.realpath(ROOT / "server") + os.sep


@contextmanager
def watched() -> Iterator[set[CodeType]]:
    """Collect the code objects called in the block, also in threads started in it."""
    seen: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def modules_of(seen: set[CodeType]) -> set[str]:
    """Return the service's modules without templates, and clear ``seen``."""
    paths = {os.path.realpath(code.co_filename) for code in list(seen)}
    seen.clear()
    return {path.removeprefix(SERVER) for path in paths if path.startswith(SERVER) and path.endswith(".py")}


def test_requests_and_jobs_use_few_functions(tmp_path: Path) -> None:
    """An API list, a page and a conversion job stay within their limits, measured on the second call."""
    with watched() as seen, running_app(f"sqlite:///{tmp_path}/c.sqlite", tmp_path) as app:
        dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path / "main" / "run" / "step-1", no_dist=True)
        roots = {name: {"url": str(tmp_path / name)} for name in ("main", "other")}
        runs = KindRuns(app.service.database, tmp_path / "work", roots)
        runs.scan("main")
        client = app.client("admin")

        def entered(path: str, accept: str = "*/*") -> set[str]:
            for _ in range(2):
                seen.clear()
                assert client.get(path, headers={"Accept": accept}).status_code == 200, path
            return modules_of(seen)

        def converted(name: str) -> set[str]:
            seen.clear()
            target = {"to": "torch", "target_root": "other", "target_key": name}
            job = {"kind": "convert", "params": {"checkpoint_id": 1, **target}}
            number = client.post("/api/v1/jobs", json=job).json()["id"]
            while not runs.job(number).is_final:
                made = runs.claim()
                assert made is not None
                runs.complete(made, runs.carry_out(made))
            assert runs.job(number).state == "succeeded"
            return modules_of(seen)

        each = entered("/api/v1/whoami")
        converted("one.pt")
        runs.drain()
        found = {
            "list": entered("/api/v1/checkpoints") - each,
            "page": entered("/runs/1/drift", "text/html") - each,
            "conversion": converted("two.pt") - each,
        }
    counts = {name: len(modules) for name, modules in found.items()}
    assert all(counts[name] <= most for name, most in MOST_OF_SERVICE.items()), (counts, found)


def test_few_modules_share_a_name() -> None:
    """At most two modules of the service share a name; more would differ by folder only."""
    names = Counter(path.stem for path in (ROOT / "server").rglob("*.py") if path.stem != "__init__")
    assert {name: count for name, count in names.items() if count > 2} == {}
