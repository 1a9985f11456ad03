"""A wheel and an sdist of a clean clone, installed into empty environments and tried: ``make packages``.

For each Python and each extra there is an environment of its own, which pip makes of the wheel and of the
index, and which is removed again. What an extra promises is tried by `package_trials.py`. Status 1 where
anything failed. ``--uv`` installs with uv, which is several times faster than pip.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRIALS = Path(__file__).with_name("package_trials.py")
PYTHONS = ("python3.11", "python3.12", "python3.13")
NOTHING = "none"
"""Stands for no extra at all."""


class CommandError(Exception):
    """A command failed; the message is what it said at the end."""


def run(*command: object, cwd: Path | None = None) -> str:
    """What it prints."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{command}: {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def declared_extras() -> dict[str, list[str]]:
    """Extras with their requirements."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {str(extra): list(requirements) for extra, requirements in table.items()}


def members(extra: str) -> set[str]:
    """The extra with those that it consists of, as pyproject.toml has them; of several, all."""
    if "," in extra:
        return set().union(*map(members, extra.split(",")))
    found = {extra}
    for requirement in declared_extras().get(extra, ()):
        if requirement.startswith("dcphub["):
            found |= members(requirement[len("dcphub[") : -1])
    return found


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


def try_extra(python: str, extra: str, wheel: Path, tools: Path, arguments: argparse.Namespace) -> str:
    """In an environment that is empty before, without pip even, and gone afterwards: how many packages there
    are, none of which lacks another."""
    with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
        inside = Path(name, "env/bin/python")
        run(python, "-m", "venv", "--without-pip", inside.parents[1])
        pip = (tools / "bin/python", "-m", "pip", "--python", inside)
        uv = (tools / "bin/uv", "pip", "install", "--python", inside)
        constraints = Path(name, "constraints")
        constraints.write_text("\n".join(arguments.constraint))
        wanted = str(wheel) if extra == NOTHING else f"{wheel}[{extra}]"
        run(*(uv if arguments.uv else (*pip, "install")), "--quiet", wanted, "--constraint", constraints)
        run(*pip, "check")
        run(inside, "-I", TRIALS, *sorted(members(extra) - {NOTHING}), cwd=Path(name))
        return f"passed with {len(run(*pip, 'list', '--format', 'freeze').split())} packages"


def main() -> int:
    """Every extra on every Python that is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.packages", description=__doc__)
    parser.add_argument("--python", action="append", help=f"an interpreter; else {', '.join(PYTHONS)}")
    parser.add_argument(
        "--extra", action="append", help=f"several with commas, or {NOTHING}; else each but dev"
    )
    parser.add_argument("--without-torch", action="store_true", help="leave out the extras that bring it")
    parser.add_argument("--uv", action="store_true", help="install with uv")
    parser.add_argument("--constraint", action="append", default=[], help="for pip, such as torch==2.13.0")
    arguments = parser.parse_args()
    extras = arguments.extra or [NOTHING, *(name for name in declared_extras() if name != "dev")]
    chosen = [extra for extra in extras if not (arguments.without_torch and "torch" in members(extra))]
    tried, failed = 0, 0
    with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
        wheel = build(Path(name), tools := Path(name, "tools"))
        for python in arguments.python or PYTHONS:
            try:
                version = run(python, "-c", "import platform, venv; print(platform.python_version())").strip()
            except (CommandError, OSError):
                print(f"{python}: not found, or without venv; nothing was tried on it")
                continue
            for extra in chosen:
                tried += 1
                try:
                    outcome = try_extra(python, extra, wheel, tools, arguments)
                except CommandError as error:
                    failed, outcome = failed + 1, f"FAILED: {error}"
                print(f"{version} [{extra}]: {outcome}", flush=True)
    return int(not tried or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
