"""A wheel and an sdist of a clean clone, installed into empty environments and tried: ``make packages``.

For each Python and each extra there is an environment of its own, which pip makes of the wheel and of the
index, and which is removed again. What an extra promises is tried by `package_trials.py`. Ends with a table,
and with status 1 where anything failed.

Where torch's packages are several GB, ``--base`` names an environment with torch, and nothing else, for each
Python: those of an extra that brings torch begin with hard links of its packages. ``--uv`` installs with uv,
which is several times faster than pip; what it may choose from follows from its own settings.
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


def build(folder: Path, tools: Path) -> Path:
    """The wheel of a clean clone; the sdist beside it is whole, as its own wheel is the same."""
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/pip", "install", "--quiet", "--upgrade", "build", "pip", "twine", "uv")
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


@dataclass(frozen=True)
class Kit:
    """What all environments are made with."""

    tools: Path
    wheel: Path
    constraints: Path
    bases: dict[str, Path]
    """Environments with torch, by the version of their Python."""
    uses_uv: bool

    def try_extra(self, python: str, version: str, extra: str) -> Outcome:
        """In an environment that is empty before, without pip even, and gone afterwards."""
        trouble, packages, size = "", 0, 0
        with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
            environment = Path(name) / "env"
            try:
                run(python, "-m", "venv", "--without-pip", environment)
                if brings_torch(extra) and version in self.bases:
                    share_packages(self.bases[version], environment)
                packages = self.install(environment / "bin/python", extra)
                run(
                    environment / "bin/python",
                    "-I",
                    TRIALS,
                    *sorted(members(extra) - {NOTHING}),
                    cwd=Path(name),
                )
            except CommandError as error:
                trouble = str(error)
            size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file()) >> 20
        return Outcome(version, extra, packages, size, trouble)

    def install(self, inside: Path, extra: str) -> int:
        """As by a user; how many packages there are then, none of which lacks another."""
        pip = (self.tools / "bin/python", "-m", "pip", "--python", inside)
        installer = (
            (self.tools / "bin/uv", "pip", "install", "--python", inside)
            if self.uses_uv
            else (*pip, "install")
        )
        wanted = str(self.wheel) if extra == NOTHING else f"{self.wheel}[{extra}]"
        run(*installer, "--quiet", wanted, "--constraint", self.constraints)
        run(*pip, "check")
        return len(run(*pip, "list", "--format", "freeze").split())


def share_packages(base: Path, environment: Path) -> None:
    """Hard links, which pip takes for installed packages, and replaces as such."""
    (source,), (target,) = (folder.glob("lib/python3*/site-packages") for folder in (base, environment))
    run("cp", "--archive", "--link", f"{source}/.", target)


def version_of(python: str | Path) -> str | None:
    """Of an interpreter that runs and can make environments; None otherwise."""
    try:
        return run(python, "-c", "import platform, venv; print(platform.python_version())").strip()
    except (CommandError, OSError):
        return None


def try_all(arguments: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Every extra on every Python that is there."""
    wheel = build(folder, tools := folder / "tools")
    commit = run("git", "rev-parse", "--short", "HEAD", cwd=ROOT).strip()
    print(f"{wheel.name} and its sdist, of commit {commit}", flush=True)
    constraints = folder / "constraints"
    constraints.write_text("\n".join(arguments.constraint))
    bases = {str(version_of(base / "bin/python")): base for base in arguments.base}
    kit, outcomes = Kit(tools, wheel, constraints, bases, arguments.uv), []
    for python in arguments.python or PYTHONS:
        version = version_of(python)
        if version is None:
            print(f"{python}: not found, or without venv; nothing was tried on it")
            continue
        for extra in arguments.extra or [NOTHING, *(name for name in declared_extras() if name != "dev")]:
            if arguments.without_torch and brings_torch(extra):
                print(f"{version} [{extra}]: brings torch, left out")
                continue
            start = time.monotonic()
            outcomes.append(outcome := kit.try_extra(python, version, extra))
            print(
                f"{version} [{extra}]: {outcome.trouble or 'well'}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown: a line for each extra, a column for each Python, with how many packages there are then."""
    pythons = list(dict.fromkeys(outcome.python for outcome in outcomes))
    lines = ["| extra | " + " | ".join(pythons) + " |", "|---" * (len(pythons) + 1) + "|"]
    cells = {
        (outcome.extra, outcome.python): "FAILED"
        if outcome.trouble
        else f"passed: {outcome.packages}, {outcome.megabytes} MB"
        for outcome in outcomes
    }
    for extra in dict.fromkeys(outcome.extra for outcome in outcomes):
        lines.append(
            "| " + " | ".join([extra, *(cells.get((extra, python), "") for python in pythons)]) + " |"
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
    parser.add_argument("--base", action="append", default=[], type=Path, help="an environment with torch")
    parser.add_argument("--uv", action="store_true", help="install with uv")
    parser.add_argument("--constraint", action="append", default=[], help="for pip, such as torch==2.13.0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
        outcomes = try_all(arguments, Path(name))
    print(table(outcomes))
    return int(not outcomes or any(outcome.trouble for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
