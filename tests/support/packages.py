"""A wheel and an sdist of a clean clone, installed into empty environments and tried: ``make packages``.

For each Python and each extra there is an environment of its own, which pip makes of the wheel and of the
index, and which is removed again. What an extra promises is tried by `package_trials.py`. Ends with a table,
and with status 1 where anything failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIALS = Path(__file__).with_name("package_trials.py")
PYTHONS = ("python3.11", "python3.12", "python3.13")
NOTHING = "none"
"""Stands for no extra at all."""


@dataclass(frozen=True)
class Outcome:
    """Of one environment; ``trouble`` is empty where all is well."""

    python: str
    extra: str
    packages: int
    megabytes: int
    trouble: str


class CommandError(Exception):
    """A command failed; the message is what it said at the end."""


def run(*command: object, cwd: Path | None = None) -> str:
    """What it prints."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{command}: {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def members(extra: str) -> set[str]:
    """The extra with those that it consists of, as pyproject.toml has them; of several, all."""
    if "," in extra:
        return set().union(*map(members, extra.split(",")))
    found = {extra}
    for requirement in declared_extras().get(extra, ()):
        if requirement.startswith("dcphub["):
            found.update(*map(members, requirement[len("dcphub[") : -1].split(",")))
    return found


def declared_extras() -> dict[str, list[str]]:
    """Extras with their requirements."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {str(extra): list(requirements) for extra, requirements in table.items()}


def brings_torch(extra: str) -> bool:
    """Also by what it asks for."""
    return "torch" in members(extra)


def build(folder: Path) -> Path:
    """The wheel of a clean clone; the sdist beside it is whole, as its own wheel is the same."""
    tools = folder / "tools"
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/pip", "install", "--quiet", "build", "twine")
    clone, out = folder / "clone", folder / "dist"
    run("git", "clone", "--quiet", ROOT, clone)
    run(tools / "bin/python", "-m", "build", "--wheel", "--outdir", folder / "direct", clone)
    run("git", "clean", "-xdfq", cwd=clone)
    run(tools / "bin/python", "-m", "build", "--outdir", out, clone)  # the sdist, and a wheel of that
    (direct,), (of_sdist,) = (folder / "direct").glob("*.whl"), out.glob("*.whl")
    if contents(direct) != contents(of_sdist):
        raise CommandError("the wheel of the sdist is not that of the clone")
    run(tools / "bin/python", "-m", "twine", "check", "--strict", *out.iterdir())
    return of_sdist


def contents(wheel: Path) -> dict[str, bytes]:
    """Files by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def try_extra(python: str, version: str, extra: str, wheel: Path, constraints: Path) -> Outcome:
    """In an environment that has nothing but pip before, and is gone afterwards."""
    trouble, packages, size = "", 0, 0
    with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
        environment = Path(name) / "env"
        inside = environment / "bin/python"
        wanted = str(wheel) if extra == NOTHING else f"{wheel}[{extra}]"
        try:
            run(python, "-m", "venv", environment)
            run(inside, "-m", "pip", "install", "--quiet", wanted, "--constraint", constraints)
            packages = len(run(inside, "-m", "pip", "list", "--format", "freeze").split())
            run(inside, "-m", "pip", "check")
            run(inside, "-I", TRIALS, *sorted(members(extra) - {NOTHING}), cwd=Path(name))
        except CommandError as error:
            trouble = str(error)
        size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file()) >> 20
    return Outcome(version, extra, packages, size, trouble)


def version_of(python: str) -> str | None:
    """Of an interpreter that runs and can make environments; None otherwise."""
    program = "import ensurepip, platform, venv; print(platform.python_version())"
    try:
        return run(python, "-c", program).strip()
    except (CommandError, OSError):
        return None


def try_all(arguments: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Every extra on every Python that is there."""
    wheel = build(folder)
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip()
    print(f"{wheel.name} and its sdist, of commit {commit}", flush=True)
    constraints = folder / "constraints"
    constraints.write_text("\n".join(arguments.constraint))
    outcomes = []
    for python in arguments.python or PYTHONS:
        version = version_of(python)
        if version is None:
            print(f"{python}: not found, or without ensurepip; nothing was tried on it")
            continue
        for extra in arguments.extra or [NOTHING, *(name for name in declared_extras() if name != "dev")]:
            if arguments.without_torch and brings_torch(extra):
                print(f"{version} [{extra}]: brings torch, left out")
                continue
            start = time.monotonic()
            outcomes.append(outcome := try_extra(python, version, extra, wheel, constraints))
            print(
                f"{version} [{extra}]: {outcome.trouble or 'well'}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown."""
    lines = ["| Python | extra | packages | MB | |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        state = "FAILED" if outcome.trouble else "passed"
        lines.append(
            f"| {outcome.python} | {outcome.extra} | {outcome.packages} | {outcome.megabytes} | {state} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.packages", description=__doc__)
    parser.add_argument("--python", action="append", help=f"an interpreter; else {', '.join(PYTHONS)}")
    parser.add_argument(
        "--extra",
        action="append",
        help=f"of pyproject.toml, several with commas, or {NOTHING}; else each but dev",
    )
    parser.add_argument("--without-torch", action="store_true", help="leave out the extras that bring it")
    parser.add_argument("--constraint", action="append", default=[], help="for pip, such as torch==2.13.0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
        outcomes = try_all(arguments, Path(name))
    print(table(outcomes))
    return int(not outcomes or any(outcome.trouble for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
