"""Build a wheel and an sdist of a clean clone and try each extra in an empty environment: ``make packages``.

Each pair of Python and extra gets an environment. There ``pip check`` must pass, licences must be allowed,
and `package_trials.py` tries the extra. ``--dist FOLDER`` keeps the wheel and the sdist and writes an SBOM
beside them (``make sbom``). ``--uv`` installs with uv, which is faster than pip. The exit status is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
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
"""No extra."""
COPYLEFT = re.compile(
    r"\bA?GPL(?!\S* WITH GCC-exception)|\b(SSPL|BUSL|EUPL)|(?<!Lesser )General Public License", re.IGNORECASE
)
"""Licences refused in any extra. LGPL and MPL are allowed: dcphub imports such packages and changes none."""
READ = {"torchao": "BSD-3-Clause", "nvidia-": "LicenseRef-NVIDIA", "cuda-toolkit": "LicenseRef-NVIDIA"}
"""Packages, or prefixes of names, without a licence in their metadata; read by hand."""
VENDORED = re.compile(r"^(\S+) (\d+\.\S+) +(\S+)", re.MULTILINE)
"""Lines of NOTICE: name, version, licence."""
FILES = {
    "py.typed",
    "planners/weight_maps/ready/qwen3.hf-to-titan.toml",
    "server/core/pages/static/app.js",
    "server/core/pages/static/vendor/uplot.LICENSE",
    "server/core/pages/templates/base.html",
}
"""One data file of each kind, all below ``dcp/`` in the wheel; tests/project/test_layout.py compares all."""


class CommandError(Exception):
    """A command failed; the message is the end of its output."""


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return its standard output."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{command}: {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def declared_extras() -> dict[str, list[str]]:
    """Return the extras of pyproject.toml with their requirements."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {str(extra): list(requirements) for extra, requirements in table.items()}


def members(extra: str) -> set[str]:
    """Return the extra (or several, separated by commas) with the extras that it includes."""
    if "," in extra:
        return set().union(*map(members, extra.split(",")))
    found = {extra}
    for requirement in declared_extras().get(extra, ()):
        if requirement.startswith("dcphub["):
            found |= members(requirement[len("dcphub[") : -1])
    return found


def build(folder: Path, tools: Path) -> Path:
    """Build the wheel and the sdist of a clean clone; a wheel built from the sdist must be the same."""
    run(sys.executable, "-m", "venv", tools)
    packages = ("build", "cyclonedx-bom", "pip", "pip-licenses", "twine", "uv")
    run(tools / "bin/pip", "install", "--quiet", "--upgrade", *packages)
    clone, out = folder / "clone", folder / "dist"
    run("git", "clone", "--quiet", ROOT, clone)
    run(tools / "bin/python", "-m", "build", "--wheel", "--outdir", folder / "direct", clone)
    run("git", "clean", "-xdfq", cwd=clone)
    run(tools / "bin/python", "-m", "build", "--outdir", out, clone)  # the sdist, and a wheel of that
    (direct,), (of_sdist,) = (folder / "direct").glob("*.whl"), out.glob("*.whl")
    if contents(direct) != contents(of_sdist):
        raise CommandError("the wheel built from the sdist differs from the wheel of the clone")
    names = {name.removeprefix("dcp/") for name in contents(direct) if name.startswith("dcp/")}
    metadata = {name for name in contents(direct) if ".dist-info/" in name}
    if not names >= FILES or len(names) + len(metadata) != len(contents(direct)):
        raise CommandError(f"the wheel lacks {FILES - names} or has files outside dcp/")
    run(tools / "bin/python", "-m", "twine", "check", "--strict", *out.iterdir())
    return of_sdist


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def licences(tools: Path, inside: Path) -> dict[str, str]:
    """Return the licences of the installed packages; raise CommandError for copyleft or unknown ones."""
    command = (tools / "bin/pip-licenses", "--python", inside, "--from", "mixed", "--format", "json")
    found = {str(one["Name"]): str(one["License"]) for one in json.loads(run(*command))}
    for name in found:
        for prefix, licence in READ.items():
            if name.startswith(prefix):
                found[name] = licence
    wrong = {
        name: licence
        for name, licence in found.items()
        if licence == "UNKNOWN" or all(COPYLEFT.search(choice) for choice in licence.split(" OR "))
    }
    if wrong:
        raise CommandError(f"licences that are copyleft or unknown: {wrong}")
    return found


def write_sbom(tools: Path, inside: Path, target: Path) -> None:
    """Write the installed packages and the vendored files of the web pages as CycloneDX 1.6 in JSON."""
    options = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "library", "--output-reproducible")
    document = json.loads(run(tools / "bin/cyclonedx-py", "environment", *options, inside))
    version = run(inside, "-c", "import dcp.version; print(dcp.version.__version__)").strip()
    component = document["metadata"]["component"]
    component |= {"version": version, "purl": f"pkg:pypi/dcphub@{version}"}
    for name, vendored, licence in VENDORED.findall((ROOT / "NOTICE").read_text()):
        purl = f"pkg:npm/{name.lower()}@{vendored}"
        licenses = [{"license": {"id": licence, "acknowledgement": "declared"}}]
        document["components"].append(
            {"type": "library", "bom-ref": purl, "name": name, "version": vendored, "purl": purl}
            | {"licenses": licenses}
        )
        document["dependencies"].append({"ref": purl})
    target.write_text(json.dumps(document, indent=2) + "\n")


def try_extra(python: str, extra: str, wheel: Path, tools: Path, arguments: argparse.Namespace) -> str:
    """Install and try the extra in an environment without pip; return the number of packages."""
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
        found = licences(tools, inside)
        run(inside, "-I", TRIALS, *sorted(members(extra) - {NOTHING}), cwd=Path(name))
        if arguments.dist:
            write_sbom(tools, inside, arguments.dist / f"{wheel.name.partition('-py3')[0]}-{extra}.cdx.json")
        return f"passed with {len(found)} packages"


def main() -> int:
    """Try the chosen extras on the chosen Pythons; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.packages", description=__doc__)
    parser.add_argument("--python", action="append", help=f"an interpreter; else {', '.join(PYTHONS)}")
    parser.add_argument(
        "--extra", action="append", help=f"several with commas, or {NOTHING}; else each but dev"
    )
    parser.add_argument("--without-torch", action="store_true", help="leave out the extras that bring it")
    parser.add_argument("--uv", action="store_true", help="install with uv")
    parser.add_argument("--dist", type=Path, help="keep wheel and sdist here, with SBOMs of the extras")
    parser.add_argument("--constraint", action="append", default=[], help="for pip, such as torch==2.13.0")
    arguments = parser.parse_args()
    extras = arguments.extra or [NOTHING, *(name for name in declared_extras() if name != "dev")]
    chosen = [extra for extra in extras if not (arguments.without_torch and "torch" in members(extra))]
    tried, failed = 0, 0
    with tempfile.TemporaryDirectory(prefix="dcphub-packages-") as name:
        wheel = build(Path(name), tools := Path(name, "tools"))
        if arguments.dist:
            arguments.dist.mkdir(parents=True, exist_ok=True)
            for built in wheel.parent.iterdir():
                shutil.copy(built, arguments.dist)
        for python in arguments.python or PYTHONS:
            try:
                version = run(python, "-c", "import platform, venv; print(platform.python_version())").strip()
            except (CommandError, OSError):
                print(f"{python}: not found or without the module venv; skipped")
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
