"""Pages name only existing modules, folders and pages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULE = re.compile(r"`([\w/]+\.py)`")
FOLDER = re.compile(r"`((?:dcp|docs|planners|server|storage|tests|tools|benchmarks|examples)/[\w/]*/)`")
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)")


def sources() -> list[str]:
    """Return the paths of all modules, each with a leading slash."""
    folders = ("dcp", "planners", "storage", "server", "tests", "tools", "benchmarks", "examples")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_and_pages_named_by_a_page_exist(page: Path) -> None:
    """Modules, by a suffix of the path, folders, by path, and linked pages exist."""
    text = page.read_text()
    modules = sources()
    missing = [
        name for name in MODULE.findall(text) if not any(path.endswith(f"/{name}") for path in modules)
    ]
    missing += [name for name in FOLDER.findall(text) if not (ROOT / name).is_dir()]
    missing += [name for name in LINK.findall(text) if not (page.parent / name).is_file()]
    assert not missing


def test_the_description_on_a_package_index_stands_alone() -> None:
    """No picture and no link, which would be relative; the example is the README's."""
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]["text"]
    assert "](" not in readme
    example = re.compile(r"^```python\n.*?^```", re.MULTILINE | re.DOTALL)
    assert example.findall(readme) == example.findall((ROOT / "README.md").read_text())
