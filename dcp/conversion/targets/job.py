"""What a format is given to lay out a target of it, and what it gives back.

A format that can be written is a function of a `LayoutJob` that returns a `Planned` target (its
`dcp.storage.formats.format.Target` names it). It describes files and where in them each tensor's bytes are to
be; the bytes are moved by others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from dcp.conversion.contents.entries import Entries, Value
from dcp.conversion.contents.hf_folder import HfFolder
from dcp.conversion.contents.values import SourceValues
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.layouts.sources import payload_crcs
from dcp.conversion.layouts.terms import MergedTensors
from dcp.planners.weight_maps.mapped_index import MappedIndex
from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats.plain import encode_plain

__all__ = ["Chunks", "LayoutJob", "LayoutOptions", "Planned"]

_MAX_LISTED: Final = 10
_MAX_VALUE_BYTES: Final = 64 << 20


Chunks = Literal["keep", "split"]
"""``keep``: the source's chunks. ``split``: each tensor in as many chunks along dimension 0 as there are
files."""


@dataclass(frozen=True)
class LayoutOptions:
    """Options that are about the target alone; each is for the formats that have a use for it.

    ``to`` is the `Target.name`. ``files`` and ``chunks`` as for `dcp.convert`. What ``hf`` has is beside the
    weights.
    """

    to: str
    files: int = 1
    chunks: Chunks = "keep"
    shard_bytes: int | None = None
    drop_objects: bool = False
    hf: HfFolder | None = None


@dataclass(frozen=True)
class Planned:
    """A layout, and the names of the values that it leaves out. ``mapped``: its tensors are made of the
    source's, of several the first one's, by a weight map; ``merged``: they are sums of those of several."""

    layout: TargetLayout
    dropped: tuple[str, ...]
    mapped: MappedIndex | None = None
    merged: MergedTensors | None = None


@dataclass(frozen=True)
class LayoutJob:
    """``entries`` are the tensors and values to be written, ``values`` reads what those are.

    ``file_name`` is that of the file where the target is just one. ``is_compared``: whoever copies compares
    what is read with the source's checksums, so that a target needs none that are of those bytes. ``origin``
    is for the provenance.
    """

    entries: Entries
    values: SourceValues
    options: LayoutOptions
    file_name: str | None
    save_id: str
    source_url: str
    is_compared: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def crcs(self) -> Mapping[int, int]:
        """The source's checksums of whole tensors, by row; none where nobody compares them."""
        return payload_crcs(self.entries.index) if self.is_compared else {}

    def contents(self, *, is_plain_only: bool) -> tuple[dict[str, Any], dict[str, str]]:
        """(values by name, why the others have none). ``is_plain_only``: plain data is all that there is room
        for."""
        found: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for value in self.entries.values:
            try:
                content = self.values.value(value.row)
                if is_plain_only and encode_plain(content, limit_bytes=_MAX_VALUE_BYTES) is None:
                    raise CheckpointFormatError("is no plain data, or too large")
                found[value.fqn] = content
            except CheckpointFormatError as error:
                refused[value.fqn] = str(error)
        return found, refused

    def kept(self, refused: Mapping[str, str]) -> tuple[list[Value], tuple[str, ...]]:
        """(values that stay, names of those dropped), which are those of ``refused`` and what the source
        itself refuses. PlanError that lists these unless they may be dropped."""
        refused = {**self.entries.refused, **refused}
        if refused and not self.options.drop_objects:
            told = [f"{fqn!r} ({why})" for fqn, why in list(refused.items())[:_MAX_LISTED]]
            more = f" and {len(refused) - _MAX_LISTED} more" if len(refused) > _MAX_LISTED else ""
            raise PlanError(
                f"{len(refused)} of the values cannot be converted to {self.options.to}: "
                f"{'; '.join(told)}{more}. Exclude them",
                alternative="drop all such values",
                argument="drop_objects=True",
                fqns=list(refused)[:_MAX_LISTED],
            )
        return [value for value in self.entries.values if value.fqn not in refused], tuple(refused)
