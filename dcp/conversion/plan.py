"""Plan of a conversion: from a source and options to a target layout."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dcp.conversion.contents.entries import Entries, mapped_entries
from dcp.conversion.contents.values import SourceValues
from dcp.conversion.merging.joined import members_of
from dcp.conversion.merging.terms import merge_entries
from dcp.conversion.publishing import local_files
from dcp.conversion.targets.job import ConversionOptions, LayoutJob, Planned
from dcp.conversion.targets.places import TargetPlace
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.storage.commit_names import is_commit_object
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.errors import OptionError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.opening.sources import Source
from dcp.storage.formats.registry import target_named
from dcp.storage.formats.safetensors.format import SAFETENSORS

__all__ = ["ConversionOptions", "Planned", "fingerprint", "plan_layout", "plan_target", "refuse_itself"]


def refuse_itself(source: Source, place: TargetPlace) -> None:
    """OptionError if ``place`` is where the source is, or a file of it."""
    for member in members_of(source):
        here, there = (
            url if "://" in url else os.path.realpath(url) for url in (member.store.url, place.store.url)
        )
        if here != there:
            continue
        if member.file == place.file_name:
            raise OptionError(
                f"source and target are both {place.url}; convert to another place", path=place.url
            )
        if place.file_name in member.index.files or is_commit_object(place.file_name or ""):
            raise OptionError(
                f"{place.url} is a file of the source; convert to another place", path=place.url
            )
        if place.file_name is None and (member.file is None or not local_files.stays(member.file)):
            raise OptionError(
                f"the source {member.name} is a file that the new checkpoint in {place.url} would replace; "
                "convert to another place",
                path=place.url,
            )


def plan_target(
    engine: ReadEngine, source: Source, place: TargetPlace, options: ConversionOptions, save_id: str
) -> Planned:
    """The layout of all that the options choose of ``source``, which ``engine`` reads, checked. Raises
    PlanError, MissingKeyError."""
    if options.hf is not None and (options.to != SAFETENSORS.name or place.file_name is not None):
        raise OptionError("hf is for a folder of safetensors: to='safetensors', and no name of a file")
    chosen = {name: getattr(options, name) for name in ("only", "exclude", "rename", "dtype")}
    maps, merged = options.weight_maps, None
    if options.arithmetic is None:
        weights = maps[0] if maps else None
        entries, mapped = mapped_entries(engine.index, engine.store, weights, **chosen)
    else:
        beside = options.hf.config if options.hf is not None else None
        members = members_of(source)
        entries, mapped, merged = merge_entries(members, options.arithmetic, maps, config=beside, **chosen)
    origin = dict(merged.origin) if merged is not None else {}
    if told := list(dict.fromkeys(one.told for one in maps if one is not None)):
        origin["map"] = ", ".join(told)
    planned = plan_layout(entries, engine, place, options, save_id, origin=origin)
    planned.layout.check()
    return replace(planned, mapped=mapped, merged=merged)


@garbage_collection_paused()
def plan_layout(
    entries: Entries,
    engine: ReadEngine,
    place: TargetPlace,
    options: ConversionOptions,
    save_id: str,
    *,
    is_compared: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> Planned:
    """The target's layout. PlanError, with names, for values that it cannot hold and must not drop.

    ``is_compared``: whoever copies compares what is read with the source's checksums. ``origin`` as in
    `LayoutJob`.
    """
    target = target_named(options.to)[1]
    values, url = SourceValues(engine), engine.store.url
    job = LayoutJob(entries, values, options, place.file_name, save_id, url, is_compared, origin or {})
    planned: Planned = target.lay_out(job)
    return planned


# -- identity ------------------------------------------------------------------------------------------------


def fingerprint(mark: str, planned: Planned, *, by_file: bool) -> str:
    """Equal for runs that would write the same bytes from a source of that ``mark``, and for no others."""
    layout = planned.layout
    digest = hashlib.sha256(f"{mark} {by_file}".encode())
    if planned.mapped is not None:
        digest.update(planned.mapped.identity.encode())
    if planned.merged is not None:
        digest.update(planned.merged.identity.encode())
    digest.update(np.array(layout.file_sizes, "<i8").tobytes())
    copies = layout.copies
    boxes = copies.tensors, copies.box_offsets, copies.box_sizes
    for column in (*boxes, copies.dtype_codes, copies.files, copies.offsets):
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    for literal in layout.literals:
        digest.update(struct.pack("<QQI", literal.file, literal.offset, crc32(literal.data)))
    return digest.hexdigest()
