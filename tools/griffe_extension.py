"""Griffe extension of the Python reference: links in docstrings, options of ``**options``, strict warnings.

``zensical.toml`` names it. A name in single backticks becomes a link if the site documents the object.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, Final

import griffe

__all__ = ["ReferenceExtension"]

_NAME: Final = re.compile(r"(?<![`\w])`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_KEYWORD: Final = griffe.ParameterKind.keyword_only


class _Failing(logging.Handler):
    """Handler that turns a warning about a docstring into an error, which ends the build."""

    def emit(self, record: logging.LogRecord) -> None:
        raise griffe.GriffeError(record.getMessage())


class ReferenceExtension(griffe.Extension):
    """Expand ``**options: Unpack[...]`` and link names, before docstrings are parsed."""

    def __init__(self) -> None:
        logging.getLogger("mkdocs.plugins").addHandler(_Failing(logging.WARNING))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace names by optional references, which stay code without a target."""
        if obj.docstring is not None:
            obj.docstring.value = _NAME.sub(lambda found: _linked(found, obj), obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Replace ``**options`` by the keys of its TypedDict, unless the docstring has a text for it."""
        if (docstring := func.docstring) is None:
            return
        for parameter in [*func.parameters]:
            kind = parameter.annotation
            is_unpacked = isinstance(kind, griffe.ExprSubscript) and kind.canonical_path.endswith(".Unpack")
            if is_unpacked and f"**{parameter.name}:" not in docstring.value:
                del func.parameters[parameter.name]
                keys = func.modules_collection[kind.slice.canonical_path].attributes.values()
                for key in keys:
                    default = "None" if str(key.annotation).endswith("None") else "..."
                    func.parameters.add(
                        griffe.Parameter(key.name, annotation=key.annotation, kind=_KEYWORD, default=default)
                    )
                docstring.value = _described(docstring.value, keys)


def _described(text: str, keys: Iterable[griffe.Attribute]) -> str:
    """Add the descriptions of keys that the docstring does not describe."""
    lines = [
        f"    {key.name}: {' '.join(key.docstring.value.split())}\n"
        for key in keys
        if key.docstring and f"    {key.name}: " not in text
    ]
    if not lines:
        return text
    head, _, rest = text.partition("\nArgs:\n")
    return f"{head}\n\nArgs:\n{''.join(lines)}{rest}"


def _linked(found: re.Match[str], obj: griffe.Object) -> str:
    head, _, rest = found[1].partition(".")
    path = head
    if head != "dcp":
        try:
            path = obj.resolve(head)
        except griffe.NameResolutionError:
            path = f"dcp.errors.{head}"
    path = path.replace("dcp.storage.errors.", "dcp.errors.")  # the ids of the page of errors
    return f'<autoref optional identifier="{path}{rest and "."}{rest}">{found[0]}</autoref>'
