"""What `make demo` and `make test` install, and when."""

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
    """A copy of what `make` goes by, with an interpreter that only notes how it is called."""

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
        """Which extras are installed, and which module runs."""
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


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Fresh, but for the environment."""
    return Checkout(tmp_path)


def test_the_demo_installs_what_it_needs_and_no_more(checkout: Checkout) -> None:
    """Once; the tests' packages come with the tests, and what is there then serves the demos, too."""
    assert checkout.make("demo") == [".[demo]", "dcp.demo"]
    assert checkout.make("demo") == ["dcp.demo"]
    assert checkout.make("test") == [".[dev]", "pytest"]
    assert checkout.make("test") == ["pytest"]
    assert checkout.make("demo") == ["dcp.demo"]
    assert checkout.make("demo", "S3=1") == ["dcp.demo"]


def test_the_tests_first_and_then_the_demo(checkout: Checkout) -> None:
    """Nothing more is installed; but it is once the packages that are needed change."""
    assert checkout.make("test") == [".[dev]", "pytest"]
    assert checkout.make("demo") == ["dcp.demo"]
    later = (checkout.folder / ".venv/.installed").stat().st_mtime + 10
    os.utime(checkout.folder / "constraints.txt", (later, later))
    assert checkout.make("demo") == [".[demo]", "dcp.demo"]


def test_the_demo_on_s3_needs_a_server(checkout: Checkout) -> None:
    """Which the other one does not bring."""
    assert checkout.make("demo") == [".[demo]", "dcp.demo"]
    assert checkout.make("demo", "S3=1") == [".[demo-s3]", "dcp.demo"]


def test_the_demo_may_stay_up_for_a_browser(checkout: Checkout) -> None:
    """Only if it is asked to."""
    assert checkout.make("demo") == [".[demo]", "dcp.demo"]
    assert "--serve" not in checkout.calls.read_text()
    assert checkout.make("demo", "SERVE=1") == ["dcp.demo"]
    assert "-m dcp.demo --serve" in checkout.calls.read_text()


def test_benchmarks_bring_what_they_compare_with(checkout: Checkout) -> None:
    """On top of the tests' packages, and once."""
    assert checkout.make("bench") == [".[dev]", ".[bench]", "benchmarks"]
    assert checkout.make("bench") == ["benchmarks"]
    assert checkout.make("test") == ["pytest"]


def test_what_is_for_development_is_not_in_the_demo() -> None:
    """And all of the demo is in what is for development, whose stamp stands for it."""
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
