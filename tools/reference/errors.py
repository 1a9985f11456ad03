"""Reference of the errors of library and client, from their classes."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import dcp.errors
from dcp.errors import CheckpointError
from tools.reference.markdown import code, paragraphs, table

__all__ = ["errors"]

HEAD = """\
# Errors

Import these classes from `dcp.errors`. Every error is a `CheckpointError`; several are also a builtin
exception, so that `except ValueError` or `except OSError` catches them. Attributes hold the facts of an
error; an attribute that is unknown has its default.
"""


def errors() -> str:
    """Return the page: the tree of classes, then each class with its bases, attributes and remedy."""
    classes = [getattr(dcp.errors, name) for name in (*dcp.errors.__all__, "RankFailedError")]
    ordered = _ordered(CheckpointError, classes)
    tree = "\n".join(f"{'    ' * depth}{one.__name__}" for depth, one in ordered)
    return "\n".join([HEAD, f"```text\n{tree}\n```\n", *(_section(one) for _, one in ordered)])


def _ordered(top: type, classes: list[type], depth: int = 0) -> list[tuple[int, type]]:
    below = sorted((one for one in classes if one.__bases__[0] is top), key=lambda one: one.__name__)
    return [(depth, top), *(pair for one in below for pair in _ordered(one, classes, depth + 1))]


def _section(error: type) -> str:
    bases = [code(one.__name__) for one in error.__bases__ if one is not Exception]
    about = [f"Bases: {', '.join(bases)}.\n"] if bases else []
    module: Any = importlib.import_module(error.__module__)
    rows = [
        (code(name), code(getattr(error, name)), paragraphs(text))
        for name, text in _attributes(module, error).items()
    ]
    return "\n".join(
        [
            f"## {error.__name__} {{ #dcp.errors.{error.__name__} }}\n",
            f"{paragraphs(error.__doc__ or '')}\n",
            *about,
            table(["attribute", "default", ""], rows),
        ]
    )


def _attributes(module: Any, error: type) -> dict[str, str]:
    (node,) = [
        one
        for one in ast.parse(inspect.getsource(module)).body
        if isinstance(one, ast.ClassDef) and one.name == error.__name__
    ]
    found: dict[str, str] = {}
    last = ""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            last = one.target.id
            if not last.startswith("_"):
                found[last] = ""
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and last in found:
            found[last] = str(one.value.value)
        else:
            last = ""
    return found
