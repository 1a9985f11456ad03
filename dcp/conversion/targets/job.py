"""Jobs of laying out a target: what a format is given, and what it returns.

A format that can be written is a function of a `LayoutJob` that returns a `Planned` target (its
`dcp.storage.formats.format.Target` names it). It describes files and where in them each tensor's bytes are to
be; the bytes are moved by others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from dcp.conversion.contents.entries import Entries, TargetDtype, Value
from dcp.conversion.contents.hf_folder import HfFolder, read_hf_folder
from dcp.conversion.contents.values import SourceValues
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.layouts.sources import MergedTensors, payload_crcs
from dcp.conversion.merging.arithmetic import Arithmetic
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.load.selection import Patterns, Rename
from dcp.planners.weight_maps.mapped_index import MappedIndex
from dcp.planners.weight_maps.model_config import CONFIG, config_of
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.errors import CheckpointFormatError, OptionError, PlanError
from dcp.storage.formats.plain import encode_plain
from dcp.storage.formats.registry import target_named

__all__ = ["Chunks", "ConversionOptions", "LayoutJob", "Planned", "plan_layout"]

_MAX_LISTED: Final = 10
_MAX_VALUE_BYTES: Final = 64 << 20


Chunks = Literal["keep", "split"]
"""``keep``: the source's chunks. ``split``: each tensor in as many chunks along dimension 0 as there are
files."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of `dcp.convert` that decide what the target holds.

    ``to`` is the `Target.name`; those up to ``hf``, whose files are beside the weights, are each for the
    formats that have a use for it. With ``arithmetic`` the conversion is a `dcp.merge`, whose source is
    several as one (`dcp.conversion.merging.joined`). ``weight_maps`` is one for all sources, or one for each;
    empty without any.
    """

    to: str
    files: int = 1
    chunks: Chunks = "keep"
    shard_bytes: int | None = None
    drop_objects: bool = False
    hf: HfFolder | None = None
    only: Patterns | None = None
    exclude: Patterns | None = None
    rename: Rename | None = None
    dtype: TargetDtype = None
    weight_maps: tuple[WeightMap | None, ...] = ()
    arithmetic: Arithmetic | None = None

    def with_template(self, hf: HfFolder) -> ConversionOptions:
        """With what ``hf`` has beside weights; its configuration is also the map's."""
        known = config_of(hf.files[CONFIG], f"{CONFIG} of {hf.url}") if CONFIG in hf.files else {}
        maps = tuple(one and replace(one, config={**known, **one.config}) for one in self.weight_maps)
        return replace(self, hf=hf, weight_maps=maps)

    def with_hf(self, hf: str | os.PathLike[str] | None, also: Sequence[str]) -> ConversionOptions:
        """With the arguments ``hf`` and ``hf_also`` of `dcp.convert`."""
        if hf is not None:
            return self.with_template(read_hf_folder(hf, also))
        if also:
            raise OptionError("hf_also= requires hf=")
        return self


@dataclass(frozen=True)
class Planned:
    """A layout, and the names of the values that it leaves out. ``mapped``: its tensors are made of the
    source's, of several the first one's, by a weight map; ``merged``: they are sums of those of several."""

    layout: TargetLayout
    dropped: tuple[str, ...]
    mapped: MappedIndex | None = None
    merged: MergedTensors | None = None

    @property
    def unmerged(self) -> tuple[str, ...]:
        """The tensors of a merge that are taken from the first source as they are."""
        return self.merged.unmerged if self.merged is not None else ()


@dataclass(frozen=True)
class LayoutJob:
    """``entries`` are the tensors and values to be written, ``values`` reads what those are.

    ``file_name`` is that of the file where the target is just one. ``is_compared``: whoever copies compares
    what is read with the source's checksums, so that a target needs none that are of those bytes. ``origin``
    is for the provenance.
    """

    entries: Entries
    values: SourceValues
    options: ConversionOptions
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


@garbage_collection_paused()
def plan_layout(
    entries: Entries,
    engine: ReadEngine,
    options: ConversionOptions,
    file_name: str | None,
    save_id: str,
    *,
    is_compared: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> Planned:
    """The target's layout. PlanError, with names, for values that it cannot hold and must not drop.

    ``is_compared``: whoever copies compares what is read with the source's checksums. ``origin`` as in
    `LayoutJob`.
    """
    values, url = SourceValues(engine), engine.store.url
    job = LayoutJob(entries, values, options, file_name, save_id, url, is_compared, origin or {})
    planned: Planned = target_named(options.to)[1].lay_out(job)
    planned.layout.check()
    return planned
