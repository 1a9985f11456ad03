"""Seeded faults: apply each patch of ``tests/mutants`` to a clean copy, and print the test that finds it.

    python -m tests.support.mutants [AREA | AREA/NAME ...] [--jobs 2] [--whole]

A patch begins with two lines, skipped by ``git apply``: ``Promise:``, the broken promise, and ``Found by:``,
the tests to run first. With ``--whole`` all of ``make test`` follows if these tests pass. The exit status is
1 if a fault stays unfound, or if the tests fail without a fault.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MUTANTS", "Mutant", "mutants"]

ROOT: Final = Path(__file__).parents[2]
MUTANTS: Final = ROOT / "tests" / "mutants"
_TIMEOUT_SECONDS: Final = 900
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A wrong change to the product. ``name`` is ``AREA/NAME``."""

    name: str
    path: Path
    promise: str
    found_by: tuple[str, ...]


def mutants(wanted: Sequence[str] = ()) -> list[Mutant]:
    """Return the mutants of the areas and names in ``wanted``, or all. ValueError for patches without both
    lines."""
    found = []
    for path in sorted(MUTANTS.glob("*/*.patch")):
        name = path.relative_to(MUTANTS).with_suffix("").as_posix()
        if wanted and not any(name == one or name.startswith(f"{one}/") for one in wanted):
            continue
        head = path.read_text().partition("\ndiff --git")[0]
        fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
        if not {"Promise", "Found by"} <= fields.keys():
            raise ValueError(f"{path}: a patch begins with the lines 'Promise: ...' and 'Found by: ...'")
        found.append(Mutant(name, path, fields["Promise"], tuple(fields["Found by"].split())))
    return found


def _copy(folder: Path) -> Path:
    """Copy the files known to git, and new files, without the rest of the checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_symlink() | (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def _apply(mutant: Mutant, folder: Path, *options: str) -> None:
    subprocess.run(["git", "apply", "--whitespace=nowarn", *options, mutant.path], cwd=folder, check=True)
    # compiled modules are identified by the second and the size of their source
    listed = subprocess.check_output(["git", "apply", "--numstat", mutant.path], cwd=folder, text=True)
    for line in listed.splitlines():
        path = folder / line.split("\t")[2]
        os.utime(path, (time.time(), path.stat().st_mtime + len(options) * 7 + 11))


def _failing_test(folder: Path, tests: Sequence[str], *, workers: int = 0) -> str | None:
    """Return the first failing test, or None; a test that cannot be collected counts as failing."""
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    parallel = ["-n", str(workers), "--dist", "loadfile"] if workers else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *parallel, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode == 0:
        return None
    if (failed := _FAILED.search(done.stdout)) is None:
        raise RuntimeError(
            f"pytest of {' '.join(tests)} ended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return failed[1]


def _try(mutant: Mutant, folder: Path, *, is_whole: bool) -> str | None:
    _apply(mutant, folder)
    try:
        found = _failing_test(folder, mutant.found_by)
        return found or (_failing_test(folder, ["tests"], workers=3) if is_whole else None)
    finally:
        _apply(mutant, folder, "--reverse")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("wanted", nargs="*", metavar="AREA[/NAME]")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="then all of make test, if these find none")
    given = parser.parse_args(arguments)
    chosen = mutants(given.wanted)
    if not chosen:
        parser.error(f"no such patch below {MUTANTS}: {' '.join(given.wanted)}")
    with tempfile.TemporaryDirectory(prefix="dcp-mutants-") as temporary:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(given.jobs):
            (folder := Path(temporary, str(number))).mkdir()
            copies.put(_copy(folder))

        def try_one(mutant: Mutant) -> bool:
            folder, begun = copies.get(), time.monotonic()
            try:
                found = _try(mutant, folder, is_whole=given.whole)
            except (RuntimeError, subprocess.SubprocessError) as error:
                found = None
                print(f"{mutant.name}: {error}", file=sys.stderr)
            finally:
                copies.put(folder)
            print(f"{mutant.name} | {found or 'NOT FOUND'} | {time.monotonic() - begun:.0f} s", flush=True)
            return found is not None

        # the tests must pass without a fault, or they would find every fault
        folder = copies.get()
        broken = _failing_test(folder, sorted({test for mutant in chosen for test in mutant.found_by}))
        copies.put(folder)
        if broken is not None:
            print(f"{broken} fails without any fault", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(given.jobs) as threads:
            results = list(threads.map(try_one, chosen))
    print(f"{sum(results)} of {len(results)} found")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
