"""From a source and options to a target layout."""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dcp.conversion.entries import Entries, Value
from dcp.conversion.extras import extras_of, metadata_of
from dcp.conversion.layout import TargetLayout
from dcp.conversion.targets.dcp import Chunks, EncodedValue, dcp_layout
from dcp.conversion.targets.places import Format, TargetPlace
from dcp.conversion.targets.safetensors import DEFAULT_SHARD_BYTES, safetensors_layout
from dcp.conversion.targets.torch_save import torch_layout
from dcp.conversion.tasks import STRETCH_BYTES, TASK_BYTES
from dcp.conversion.values import SourceValues, torch_allows
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    PlanError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.formats.plain import encode_plain
from dcp.storage.formats.torch.pickle_writer import SizeValue
from dcp.storage.formats.torch.structure import restore_structure
from dcp.storage.near_names import listed
from dcp.storage.stores.base import Store
from dcp.version import __version__

__all__ = [
    "LayoutOptions",
    "Planned",
    "SourceChangedError",
    "fingerprint",
    "plan_layout",
    "with_save_id",
]

logger = logging.getLogger(__name__)

_MAX_LISTED: Final = 10
_MAX_VALUE_BYTES: Final = 64 << 20
_SIZE: Final = "torch.Size"


class SourceChangedError(CheckpointConflictError):
    """The source is not what it was when the conversion was planned: it has to be converted anew."""


@dataclass(frozen=True)
class LayoutOptions:
    """Options that are about the target alone."""

    to: Format
    files: int = 1
    chunks: Chunks = "keep"
    shard_bytes: int | None = None
    drop_objects: bool = False


@dataclass(frozen=True)
class Planned:
    """A layout, and what it leaves out."""

    layout: TargetLayout
    dropped: tuple[str, ...]


@garbage_collection_paused()
def plan_layout(
    entries: Entries,
    engine: ReadEngine,
    place: TargetPlace,
    options: LayoutOptions,
    save_id: str,
    *,
    crcs: Mapping[int, int] | None = None,
) -> Planned:
    """The target's layout. PlanError, with names, for values that it cannot hold and must not drop.

    ``crcs`` as `payload_crcs` gives them, where whoever copies compares what is read with the source's
    checksums: then a zip needs no others.
    """
    values = SourceValues(engine)
    refused = entries.refused
    if options.to == "dcp":
        return _plan_dcp(entries, values, refused, options, save_id, engine.store.url)
    contents, more = _known_values(entries, values, is_plain_only=options.to == "safetensors")
    kept, dropped = _drop_or_refuse(entries, {**refused, **more}, options)
    if options.to == "torch":
        pairs = [(value, contents[value.fqn]) for value in kept]
        _warn_of_distrust([value.fqn for value, content in pairs if not torch_allows(content)])
        name = place.file_name or ""
        return Planned(torch_layout(name, entries, pairs, structure_of(entries), crcs or {}), dropped)
    extras = extras_of(entries, [(value, contents[value.fqn]) for value in kept], entries.structure())
    shard_bytes = DEFAULT_SHARD_BYTES if options.shard_bytes is None else options.shard_bytes
    layout = safetensors_layout(
        entries,
        file_name=place.file_name,
        shard_bytes=shard_bytes,
        metadata=metadata_of(entries.index.user),
        extras=extras,
    )
    return Planned(layout, dropped)


def _plan_dcp(
    entries: Entries,
    values: SourceValues,
    refused: Mapping[str, str],
    options: LayoutOptions,
    save_id: str,
    source_url: str,
) -> Planned:
    kept, dropped = _drop_or_refuse(entries, refused, options)
    encoded = [EncodedValue(value, values.blob(value.row), values.encoded(value.row)) for value in kept]
    index = entries.index
    origin = {"url": source_url, "format": index.format, "save_id": index.provenance.get("save_id")}
    provenance: dict[str, Any] = {
        "save_id": save_id,
        "time": time.time(),
        "dcphub_version": __version__,
        "converted_from": origin,
    }
    structure = entries.structure()
    if structure is not None:
        provenance["structure"] = structure
    layout = dcp_layout(
        entries,
        encoded,
        files=options.files,
        chunks=options.chunks,
        save_id=save_id,
        provenance=provenance,
        user=index.user,
    )
    return Planned(layout, dropped)


def _known_values(
    entries: Entries, values: SourceValues, *, is_plain_only: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """(values by name, why the others have none)."""
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for value in entries.values:
        try:
            content = values.value(value.row)
            if is_plain_only and encode_plain(content, limit_bytes=_MAX_VALUE_BYTES) is None:
                raise CheckpointFormatError("is no plain data, or too large")
            found[value.fqn] = content
        except CheckpointFormatError as error:
            refused[value.fqn] = str(error)
    return found, refused


def _warn_of_distrust(fqns: Sequence[str]) -> None:
    if fqns:
        logger.warning(
            "torch.load will need weights_only=False for the file, because of %s; dcp.load does not",
            listed(fqns, most=_MAX_LISTED),
        )


def _drop_or_refuse(
    entries: Entries, refused: Mapping[str, str], options: LayoutOptions
) -> tuple[list[Value], tuple[str, ...]]:
    """(values that stay, names of those dropped); PlanError that lists these unless they may be dropped."""
    if refused and not options.drop_objects:
        told = [f"{fqn!r} ({why})" for fqn, why in list(refused.items())[:_MAX_LISTED]]
        more = f" and {len(refused) - _MAX_LISTED} more" if len(refused) > _MAX_LISTED else ""
        raise PlanError(
            f"{len(refused)} of the values cannot be converted to {options.to}: "
            f"{'; '.join(told)}{more}. Exclude them, or drop all such values with drop_objects=True "
            "(--drop-objects)",
            fqns=list(refused)[:_MAX_LISTED],
        )
    return [value for value in entries.values if value.fqn not in refused], tuple(refused)


# -- structure -----------------------------------------------------------------------------------------------


def structure_of(entries: Entries) -> Any:
    """A function of (fqn -> path, fqn -> value) that builds the nested state dict as the source had it."""
    notes = entries.structure()
    kinds = notes.get("values", {}) if notes else {}

    def build(paths: Mapping[str, Path], values: Mapping[str, Any]) -> Any:
        def value_of(fqn: str) -> Any:
            value = values[fqn]
            return SizeValue(value) if kinds and kinds.get(fqn) == _SIZE and type(value) is tuple else value

        return restore_structure(notes, paths, value_of)

    return build


# -- identity ------------------------------------------------------------------------------------------------


def fingerprint(store: Store, index: CheckpointIndex, layout: TargetLayout, to: str, *, by_file: bool) -> str:
    """Equal for runs that would write the same bytes from an unchanged source, and for no others."""
    listing = {info.name: info for info in store.list()}
    facts = [
        (name, listing[name].size_bytes, listing[name].modified_seconds)
        for name in index.files
        if name in listing
    ]
    head = [
        __version__,
        store.url,
        to,
        by_file,
        TASK_BYTES,
        STRETCH_BYTES,
        index.provenance.get("save_id"),
        facts,
    ]
    digest = hashlib.sha256(encode_plain(head, limit_bytes=1 << 30) or b"")
    digest.update(np.array(layout.file_sizes, "<i8").tobytes())
    copies = layout.copies
    for column in (
        copies.tensors,
        copies.box_offsets,
        copies.box_sizes,
        copies.dtype_codes,
        copies.files,
        copies.offsets,
    ):
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    for literal in layout.literals:
        digest.update(struct.pack("<QQI", literal.file, literal.offset, crc32(literal.data)))
    return digest.hexdigest()


def with_save_id(layout: TargetLayout, old: str, new: str) -> TargetLayout:
    """The same layout under the save id of the run that began it."""
    if layout.index is None or old == new:
        return layout
    names = [name.replace(f".{old}.", f".{new}.") for name in layout.file_names]
    provenance = {**layout.index.provenance, "save_id": new}
    return replace(layout, file_names=names, index=replace(layout.index, files=names, provenance=provenance))
