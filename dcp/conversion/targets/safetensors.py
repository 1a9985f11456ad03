"""Layout of a safetensors file, or of a Hugging Face folder with an index and shards of bounded size.

Bytes equal those of the safetensors library. Tied tensors are stored once for each name, because safetensors
files cannot share bytes. The metadata records ties, nesting and plain values, which a conversion back
restores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dcp.conversion.hf_folder import ADAPTER_CONFIG, HfFolder, known_files
from dcp.conversion.layout import Copies, Literal, Literals, TargetLayout
from dcp.conversion.targets.job import LayoutJob, Planned
from dcp.inspection.entries import Entries
from dcp.planners.weight_maps.axes import CONFIG
from dcp.storage.errors import OptionError, PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.registry import WEIGHT_MAP_NAME
from dcp.storage.formats.safetensors import (
    HeaderTensor,
    header_order,
    safetensors_header,
)
from dcp.storage.formats.safetensors_extras import EXTRAS_KEY, EXTRAS_VERSION, OWN_KEYS, encode_extras
from dcp.storage.formats.weights_folder import MAX_WEIGHT_MAP_BYTES
from dcp.storage.geometry.strides import starts

DEFAULT_SHARD_BYTES: Final = 5_000_000_000
"""As in huggingface_hub."""

_SHARD_TENSORS: Final = 100_000
"""With usual name lengths, a third of the header limit of a file."""


_ADAPTER_NAME: Final = "adapter_model.safetensors"
_ADAPTER_TENSOR: Final = re.compile(
    r"(base_model\.model\.(?!.*\.default(\.|$))|prompt_embeddings).*", re.DOTALL
)
_MAX_LISTED: Final = 10
_MODEL_DTYPES: Final = frozenset(("float16", "bfloat16", "float32", "float64"))


def lay_out(job: LayoutJob) -> Planned:
    """Lay out one file, or a folder of shards of up to ``shard_bytes``; plain values go to the metadata.

    A tensor above ``shard_bytes`` gets a separate shard; a shard has at most _SHARD_TENSORS. PlanError for
    headers that readers refuse.
    """
    contents, dropped = job.contents(is_plain_only=True)
    entries, hf, shard_bytes = job.entries, job.options.hf, job.options.shard_bytes
    shard_bytes = DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes
    if shard_bytes < 1:
        raise OptionError(f"shard_bytes must be positive, not {shard_bytes}")
    facts = entries.codes.tolist(), entries.shapes, entries.size_bytes.tolist()
    tensors = list(map(HeaderTensor, entries.names, *facts))
    file_name = _ADAPTER_NAME if hf is not None and hf.is_adapter else job.file_name
    shards = [list(range(len(tensors)))] if file_name is not None else _shards(tensors, shard_bytes)
    layout = _layout(entries, tensors, shards, file_name or "model.safetensors", _extras(entries, contents))
    return Planned(layout if hf is None else _beside(layout, entries, hf), dropped)


def _beside(layout: TargetLayout, entries: Entries, hf: HfFolder) -> TargetLayout:
    """Return the copied files of a template; the file that completes a model folder comes last."""
    _check_names(entries, hf)
    found = {dtypes.BY_CODE[entry.dtype_code].name for entry in entries.tensors} & _MODEL_DTYPES
    is_one = len(found) == 1 and not hf.is_adapter
    files = dict(hf.files_for(found.pop() if is_one else None))
    last = {path: files.pop(path) for path in [*files] if "/" in path}
    last |= {name: files.pop(name) for name in (CONFIG, ADAPTER_CONFIG) if name in files}
    first = len(layout.file_names)
    literals = [Literal(first + number, 0, data) for number, data in enumerate(files.values()) if data]
    return replace(
        layout,
        file_names=[*layout.file_names, *files],
        file_sizes=[*layout.file_sizes, *map(len, files.values())],
        literals=Literals.of([*layout.literals, *literals]),
        last_files={**layout.last_files, **last},
        replaced=known_files,
    )


def _check_names(entries: Entries, hf: HfFolder) -> None:
    """Raise PlanError if no tensor has a name of the template, or an adapter tensor has no PEFT name: readers
    would ignore the tensors."""
    names = entries.names
    odd = [name for name in names if not _ADAPTER_TENSOR.fullmatch(name)] if hf.is_adapter else []
    if odd:
        raise PlanError(
            f"PEFT would not find {len(odd)} of the tensors, such as {odd[0]!r}: names in an adapter "
            "begin with base_model.model. and omit the adapter's name, such as '.default'. Select the "
            "adapter's tensors (only=), and rename them (rename=)",
            fqns=odd[:_MAX_LISTED],
        )
    if names and hf.tensor_names and hf.tensor_names.isdisjoint(names):
        raise PlanError(
            f"no tensor has a name of the template {hf.url}: {names[0]!r} in the source, "
            f"{min(hf.tensor_names)!r} in the template; from_pretrained would not find the tensors. Use "
            "only=, rename= or map=. If the names are right, pass a template without weights",
            path=hf.url,
        )


def _layout(
    entries: Entries,
    tensors: Sequence[HeaderTensor],
    shards: Sequence[Sequence[int]],
    name: str,
    extras: Mapping[str, Any],
) -> TargetLayout:
    """Lay out ``shards``, rows of ``tensors``; a single shard is called ``name``.

    ``extras`` (plain data) go into the first shard; the user's strings stay readable for other tools.
    """
    metadata = {"format": "pt"} | {
        key: text for key, text in entries.index.user.items() if _is_text(key, text)
    }
    headers, rows_of = [], []
    for file, rows in enumerate(shards):
        ordered = [rows[place] for place in header_order([tensors[row] for row in rows])]
        own = {**metadata, **({EXTRAS_KEY: encode_extras(extras)} if extras and file == 0 else {})}
        headers.append(safetensors_header([tensors[row] for row in ordered], own))
        rows_of.append(np.array(ordered, np.int64))
    count, in_order = len(shards), np.concatenate(rows_of)
    size_bytes = entries.size_bytes[in_order]
    counts, ends = np.array(list(map(len, rows_of))), starts(size_bytes)
    files, heads = np.repeat(np.arange(count), counts), np.array(list(map(len, headers)))
    before = ends[starts(counts)]
    offsets = ends[:-1] + (heads - before[:-1])[files]
    placed = entries.rows[in_order], entries.codes[in_order], files, offsets, size_bytes
    copies = Copies.of_tensors(entries.index, *placed)
    tensor_copies = {tensors[row].name: copy for copy, row in enumerate(in_order.tolist())}
    names = [name]
    if count > 1:
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    last = {WEIGHT_MAP_NAME: _index(tensors, shards, names)} if count > 1 else {}
    literals = Literals(np.arange(count), np.zeros(count, np.int64), headers)
    sizes = (heads + np.diff(before)).tolist()
    return TargetLayout(names, sizes, literals, copies, last_files=last, tensor_copies=tensor_copies)


def _shards(tensors: Sequence[HeaderTensor], shard_bytes: int) -> list[list[int]]:
    """Return rows by shard in the order of the state dict, to keep layers together."""
    shards: list[list[int]] = [[]]
    filled = 0
    for row, tensor in enumerate(tensors):
        full = filled + tensor.size_bytes > shard_bytes or len(shards[-1]) == _SHARD_TENSORS
        if shards[-1] and full:
            shards.append([])
            filled = 0
        shards[-1].append(row)
        filled += tensor.size_bytes
    return shards


def _index(tensors: Sequence[HeaderTensor], shards: Sequence[Sequence[int]], names: Sequence[str]) -> bytes:
    weight_map = {tensors[row].name: names[file] for file, rows in enumerate(shards) for row in rows}
    total = sum(tensor.size_bytes for tensor in tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    encoded = (json.dumps(document, indent=2) + "\n").encode()
    if len(encoded) > MAX_WEIGHT_MAP_BYTES:
        raise PlanError(
            f"the index of {len(weight_map)} tensors would have {len(encoded)} bytes, more than the limit of "
            f"{MAX_WEIGHT_MAP_BYTES}: convert in parts (only=), or to another format"
        )
    return encoded


def _extras(entries: Entries, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return additional metadata with values by name; empty for a flat dict of tensors."""
    order, structure = list(entries.paths), entries.structure()
    if len(contents) < len(entries.values):
        written = {*contents, *entries.names}
        order = [fqn for fqn in order if fqn in written]
    grads = set(np.flatnonzero(entries.index.requires_grad).tolist())
    has_structure = bool(structure and (structure["containers"] or structure.get("values")))
    ties = [(entry.fqn, entries.names[entry.tied_to]) for entry in entries.tensors]
    found: dict[str, Any] = {
        "paths": {fqn: path for fqn in order if len(path := entries.paths[fqn]) > 1 or path[0] != fqn},
        "values": contents,
        "ties": {fqn: first for fqn, first in ties if fqn != first},
        "structure": structure if has_structure else None,
        "requires_grad": [e.fqn for e in entries.tensors if e.tensor in grads],
        "user": {key: value for key, value in entries.index.user.items() if not _is_text(key, value)},
    }
    found = {name: value for name, value in found.items() if value}
    return {"version": EXTRAS_VERSION, "order": order, **found} if found else {}


def _is_text(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, str) and key not in OWN_KEYS
