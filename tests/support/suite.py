"""The tests as text: imports of each file and names of its tests, without importing a file."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "Collected", "Module", "has_test", "modules"]

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = ROOT / "tests"


@dataclass(frozen=True)
class Collected:
    """A function that pytest collects."""

    name: str
    lines: int
    has_docstring: bool
    is_exhaustive: bool


@dataclass(frozen=True)
class Module:
    """A file below tests/."""

    path: Path
    text: str
    first_line: str
    tests: tuple[Collected, ...]

    @cached_property
    def imported(self) -> frozenset[str]:
        """The imported modules."""
        return frozenset(_imported(_tree(self.text)))

    @cached_property
    def private(self) -> frozenset[str]:
        """Private attributes of other objects used by the file."""
        return _private(_tree(self.text)) if "._" in self.text else frozenset()

    @property
    def name(self) -> str:
        """The path of the file, as in test ids of pytest."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_test(self) -> bool:
        """True if pytest collects the file."""
        return self.path.name.startswith("test_")


@cache
def modules() -> tuple[Module, ...]:
    """Return all test modules."""
    return tuple(_module(path) for path in sorted(TESTS.rglob("*.py")))


def _tree(text: str) -> ast.Module:
    """Parse a file without garbage collection (python/cpython#106905)."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def _module(path: Path) -> Module:
    text = path.read_text()
    tree = _tree(text)
    name = path.relative_to(ROOT).as_posix()
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Module(path, text, first, tuple(_tests(name, tree)))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield dotted names of modules; of ``from dcp.x import y`` also ``dcp.x.y``, if that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [part for part in parts if node.module.startswith("dcp") and _is_module(part)]
            yield from inner
            if len(inner) < len(parts):
                yield node.module


def _private(tree: ast.Module) -> frozenset[str]:
    """Return attributes with a leading underscore, except the test's own and those in Python's
    documentation."""
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if node.attr not in {"_exit", "_asdict", "_replace", "_fields"}
    )


def _is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def _tests(name: str, tree: ast.Module) -> Iterator[Collected]:
    marked = [node for node in tree.body if isinstance(node, ast.Assign) and _is_mark(node)]
    marks = any("exhaustive" in ast.unparse(node) for node in marked)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner, body in [("", tree.body), *((one.name, one.body) for one in classes)]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield Collected(
                    "::".join(filter(None, (name, owner, node.name))),
                    (node.end_lineno or 0) - node.lineno + 1,
                    bool(ast.get_docstring(node)),
                    marks or any(ast.unparse(d) == "pytest.mark.exhaustive" for d in node.decorator_list),
                )
    for one in classes:  # a state machine's class, or a class that inherits its tests
        yield Collected(f"{name}::{one.name}", 0, True, marks)
    targets = [one.targets[0] for one in tree.body if isinstance(one, ast.Assign)]
    for target in targets:  # `TestX = Machine.TestCase`
        if isinstance(target, ast.Name) and target.id.startswith("Test"):
            yield Collected(f"{name}::{target.id}", 0, True, marks)


def _is_mark(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


@cache
def _quick() -> frozenset[str]:
    tests = [test for module in modules() if module.is_test for test in module.tests]
    names = [test.name.split("::") for test in tests if not test.is_exhaustive]
    return frozenset("::".join(name[:parts]) for name in names for parts in (1, 2, 3))


def has_test(node_id: str) -> bool:
    """Return True if `make test` includes a file, class, or test of this name; ignores parameters."""
    return node_id.partition("[")[0] in _quick()
