"""Packages that `make demo` and `make test` install, and their options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Checkout:
    """Copy of the files that `make` reads, with an interpreter that only logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
            os.utime(folder / name, (1, 1))
        self.calls = folder / "calls"
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n')
        python.chmod(0o755)

    def make(self, *arguments: str) -> list[str]:
        """Run make, and return the installed extras and the module that runs."""
        self.calls.write_text("")
        done = subprocess.run(
            ["make", *arguments, f"PYTHON={sys.executable}"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")},
        )
        assert done.returncode == 0, done.stderr
        calls = [line.split() for line in self.calls.read_text().splitlines()]
        installed = [call[call.index("--editable") + 1] for call in calls if "install" in call]
        assert all("--constraint constraints.txt" in " ".join(call) for call in calls if "install" in call)
        assert not installed or "Installing what" in done.stdout
        return installed + [call[1] for call in calls if call[1] != "pip"]


@pytest.mark.parametrize(
    "calls",
    [
        {"demo": ".[demo]", "demo ": "", "test": ".[dev]", "test ": "", "demo  ": "", "demo S3=1": ""},
        {"demo": ".[demo]", "demo S3=1": ".[demo-s3]", "demo SERVE=1": ""},
        {"bench": ".[dev] .[bench]", "bench ": "", "test": ""},
    ],
    ids=["test", "s3", "bench"],
)
def test_each_target_installs_what_it_needs_once(tmp_path: Path, calls: dict[str, str]) -> None:
    """Targets run one after the other install the extras they need, and only extras not yet installed."""
    checkout = Checkout(tmp_path)
    module = {"demo": "dcp.demo", "test": "pytest", "bench": "benchmarks"}
    found = {words: checkout.make(*words.split()) for words in calls}
    assert found == {words: [*extras.split(), module[words.split()[0]]] for words, extras in calls.items()}


def test_changed_constraints_install_extras_again(tmp_path: Path) -> None:
    """After a change of constraints.txt the next target installs its extras again."""
    checkout = Checkout(tmp_path)
    assert checkout.make("test") == [".[dev]", "pytest"]
    later = (tmp_path / ".venv/.installed").stat().st_mtime + 10
    os.utime(tmp_path / "constraints.txt", (later, later))
    assert checkout.make("demo") == [".[demo]", "dcp.demo"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("demo SERVE=1", "-m dcp.demo --serve"),
        ("test SHARD=2/4", "--shard=2/4 -m not exhaustive"),
        ("test-all SHARD=2/4", "--shard=2/4"),
    ],
)
def test_serve_and_shard_are_passed_on(tmp_path: Path, words: str, expected: str) -> None:
    """SERVE=1 and SHARD= are passed to the demo and to pytest."""
    checkout = Checkout(tmp_path)
    checkout.make(*words.split())
    assert expected in checkout.calls.read_text()


def test_the_demo_has_no_development_packages() -> None:
    """The extras of the demo lack development packages, and are contained in dev, whose stamp covers them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in extras[extra]:
            if requirement.startswith("dcphub["):
                for other in requirement[len("dcphub[") : -1].split(","):
                    found |= packages(other)
            else:
                found.add(requirement)
        return found

    assert packages("demo") <= packages("demo-s3") <= packages("dev")
    assert packages("demo") == packages("torch") | packages("server")
