"""Names of formats as the catalog keeps them and the API takes them: those that are registered, and no list.

What is registered while the service runs is known from then on; its API documents say what is known when they
are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from dcp.storage.formats.format import Format
from dcp.storage.formats.registry import file_suffixes, format_names, format_of, formats, target_names

__all__ = [
    "UNKNOWN",
    "DownloadFormat",
    "FormatName",
    "SourceFormat",
    "TargetFormat",
    "catalog_formats",
    "fault_of_target_name",
    "format_in_catalog",
]

UNKNOWN: Final = "unknown"
"""Of what the service that looked at it did not know."""


def catalog_formats() -> list[str]:
    """The formats that a checkpoint may have."""
    return [*format_names(), UNKNOWN]


def format_in_catalog(name: str) -> str:
    """``name``, or that it is not known."""
    return UNKNOWN if format_of(name) is None else name


def _download_names() -> list[str]:
    return sorted(one.target.name for one in formats() if one.target and one.target.as_file != "never")


@dataclass(frozen=True, slots=True)
class OneOfNames:
    """Beside ``str`` in an ``Annotated`` type: one of ``names()``, as if it was a ``Literal`` of them."""

    names: Callable[[], Sequence[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A check when a value comes."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """An enum of what is known now."""
        return {**handler(schema), "enum": list(self.names())}

    def _checked(self, value: str) -> str:
        names = self.names()
        if value not in names:
            *first, last = map(repr, names)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
        return value


FormatName = Annotated[str, OneOfNames(catalog_formats)]
SourceFormat = Annotated[str, OneOfNames(format_names)]
TargetFormat = Annotated[str, OneOfNames(target_names)]
DownloadFormat = Annotated[str, OneOfNames(_download_names)]
"""Formats that can be written as one file."""


def fault_of_target_name(one: Format, key: str) -> str | None:
    """The reason why a target ``key`` (in lower case) would not be found again as one of this format."""
    as_file = one.target.as_file if one.target is not None else "never"
    if as_file != "never" and one.has_suffix(key):
        return None
    if as_file == "always":
        return f"for {one.target.name if one.target else one.name} it ends in {', '.join(one.suffixes)}"
    suffixes = file_suffixes()
    return f"a folder must not end in {', '.join(suffixes)}" if key.endswith(suffixes) else None
