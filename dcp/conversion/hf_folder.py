"""Configuration and tokenizer files of a Hugging Face template: a folder, or a model of the hub.

Only known names and requested globs are copied, from the folder and its direct subfolders. Weights are not
copied, and links out of the folder are not followed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from dcp.planners.weight_maps.axes import CONFIG, MAX_CONFIG_BYTES
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError, OptionError
from dcp.storage.formats.opening import index_of_folder
from dcp.storage.formats.registry import formats
from dcp.storage.stores import OpenStore
from dcp.storage.stores.base import FileInfo, Store, place_text
from dcp.storage.stores.opening import OpenWith, ParentFolder
from dcp.storage.stores.posix.store import PosixStore

ADAPTER_CONFIG: Final[str] = "adapter_config.json"

HF_NAMES: Final = frozenset(
    f"{CONFIG} {ADAPTER_CONFIG} generation_config.json preprocessor_config.json processor_config.json "
    "video_preprocessor_config.json audio_tokenizer_config.json chat_template.jinja chat_template.json "
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt "
    "merges.txt tokenizer.model tiktoken.model tekken.json spiece.model spm.model spm_char.model "
    "sentencepiece.model sentencepiece.bpe.model source.spm target.spm bpe.codes dict.txt byte_maps.json "
    "entity_vocab.json target_vocab.json vocab-src.json vocab-tgt.json normalizer.json emoji.json "
    "word_shape.json word_pronunciation.json prophetnet.tokenizer".split()
)
"""Names that ``from_pretrained`` of models, tokenizers and processors reads besides weights."""

_CHAT_TEMPLATES: Final = "additional_chat_templates"
_CONFIGS: Final = frozenset((CONFIG, ADAPTER_CONFIG))

_OTHER_WEIGHTS: Final = (
    *(".onnx", ".onnx_data", ".gguf", ".ggml", ".h5", ".keras", ".msgpack", ".tflite", ".mlmodel", ".npz"),
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".engine"),
)
"""Suffixes of other weight formats. Such files are copied only if named in full, because they hold the
template's weights, not the result.
"""

_MAX_FILES: Final = 1000
_MAX_FILE_BYTES: Final = 64 << 20
_MAX_BYTES: Final = 128 << 20
_HUB_NAME: Final = re.compile(r"(?P<name>[\w.-]{1,96}(/[\w.-]{1,96})?)(@(?P<revision>[\w./-]{1,128}))?")


@dataclass(frozen=True, eq=False)
class HfFolder:
    """``files`` of a template at ``url`` by path, and the names of its tensors, if any."""

    url: str
    files: Mapping[str, bytes]
    tensor_names: frozenset[str] = frozenset()

    @property
    def is_adapter(self) -> bool:
        """Test for a PEFT adapter, whose weights have a different file name."""
        return ADAPTER_CONFIG in self.files

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of ``config.json``; empty if missing."""
        text = self.files.get(CONFIG, b"{}")
        try:
            found = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CheckpointFormatError(f"{CONFIG} of {self.url} is not a JSON object", path=self.url)
        return found

    def files_for(self, dtype: str | None) -> Mapping[str, bytes]:
        """Return `files` with ``dtype`` in the configuration; ``from_pretrained`` builds the model in this
        dtype."""
        named = [key for key in ("dtype", "torch_dtype") if isinstance(self.config.get(key), str)]
        if dtype is None or all(self.config[key] == dtype for key in named):
            return self.files
        shown = self.config | dict.fromkeys(named, dtype)
        return {**self.files, CONFIG: (json.dumps(shown, indent=2) + "\n").encode()}


def read_hf_folder(template: str | os.PathLike[str], also: Sequence[str] = ()) -> HfFolder:
    """Read the template at a path or URL, or the model ``ORGANISATION/NAME[@REVISION]`` of the hub (cached or
    downloaded). ``also`` are globs of further files.

    Raises OptionError for a missing template, a glob without a match, and files that are too large;
    CheckpointFormatError for an invalid configuration.
    """
    text = place_text(template)
    if "://" in text:
        return hf_folder_of(OpenWith()(text), also, OpenWith())
    folder = Path(text)
    if not folder.is_dir():
        match = _HUB_NAME.fullmatch(text)
        if match is None:
            raise OptionError(f"hf: {text} is neither a folder nor the name of a model on the hub", path=text)
        folder = _snapshot(match["name"], match["revision"], also)
    # Links are read if they stay in the folder or, in a cache of the hub, lead to that model's files.
    real = folder.resolve()
    within = real.parents[1] if real.parent.name == "snapshots" else real
    opened = partial(PosixStore, links_within=within)
    return hf_folder_of(opened(real), also, opened)


def hf_folder_of(store: Store, also: Sequence[str] = (), open_below: OpenStore | None = None) -> HfFolder:
    """Read a template from an open folder; ``open_below`` opens subfolders by URL."""
    found = [*_wanted(store, "", store.list(), also)]
    if _CONFIGS.isdisjoint(path for path, *_ in found):
        raise OptionError(
            f"hf: {store.url} is not a model folder: it has neither {CONFIG} nor {ADAPTER_CONFIG} (links out "
            "of the folder do not count)",
            path=store.url,
        )
    if open_below is not None and store.capabilities.lists_folders:
        found += _below(ParentFolder(store, open_below), also)
    idle = [glob for glob in also if not any(fnmatchcase(path, glob) for path, *_ in found)]
    if idle:
        raise OptionError(
            f"hf_also: {', '.join(map(repr, idle))} match no file of {store.url} except weights"
        )
    large = [path for path, _, info in found if info.size_bytes > _MAX_FILE_BYTES]
    total = sum(info.size_bytes for *_, info in found)
    if large or total > _MAX_BYTES or len(found) > _MAX_FILES:
        shown = (
            f"it has {len(found)} files with {total} bytes besides the weights; the limits are {_MAX_FILES} "
            f"files and {_MAX_BYTES} bytes"
        )
        if large:
            shown = f"larger than {_MAX_FILE_BYTES} bytes: {', '.join(large[:10])}"
        raise OptionError(f"hf: {store.url} cannot be a template: {shown}", path=store.url)
    files = {path: own.read(info.name, limit_bytes=_MAX_FILE_BYTES) for path, own, info in found}
    index = None  # index of the template's weights, for a comparison of names; may be missing
    with suppress(CheckpointError):
        index = index_of_folder(store)
    folder = HfFolder(store.url, files, frozenset(index.fqns if index is not None else ()))
    _ = folder.config  # sizes are checked before anything is written
    return folder


def known_files(folder: str, names: Collection[str]) -> frozenset[str]:
    """Select the files of ``names`` that ``from_pretrained`` reads, of the template (``folder`` is "") or a
    subfolder.

    Subfolders with a configuration or weights are separate models, such as a trainer's checkpoints, and are
    skipped.
    """
    if not folder:
        return HF_NAMES.intersection(names)
    if folder == _CHAT_TEMPLATES:
        return frozenset(name for name in names if name.endswith(".jinja"))
    return frozenset() if _is_model(names) else HF_NAMES.intersection(names)


def _is_model(names: Collection[str]) -> bool:
    return not _CONFIGS.isdisjoint(names) or any(map(_is_of_checkpoint, names))


def _is_of_checkpoint(name: str) -> bool:
    return is_commit_object(name) or any(one.is_in_folder(name) for one in formats())


_Beside = tuple[str, Store, FileInfo]
"""A copied file: its path, and the place to read from."""


def _below(parent: ParentFolder, also: Sequence[str]) -> Iterator[_Beside]:
    """Yield direct subfolders with their files; links are skipped."""
    for name, listing in parent.listings().items():
        is_link = parent.local_path is not None and (parent.local_path / name).is_symlink()
        if name.startswith((".", "__")) or is_link:
            continue
        try:
            store = parent.store(name)
        except CheckpointFormatError:
            continue  # the name is not valid in this store
        yield from _wanted(store, name, store.list() if listing is None else listing, also)


def _wanted(store: Store, folder: str, listing: Sequence[FileInfo], also: Sequence[str]) -> Iterator[_Beside]:
    """Yield known and requested files; in a separate model only globs that name the folder apply."""
    names = {info.name for info in listing}
    known = known_files(folder, names)
    is_own = bool(folder) and _is_model(names)
    globs = [glob for glob in also if not is_own or glob.partition("/")[0] == folder]
    for info in listing:
        path = f"{folder}/{info.name}" if folder else info.name
        # Files of a separate checkpoint, or weights, are excluded.
        may_be = not info.name.startswith(".") and not _is_of_checkpoint(info.name)
        if info.name.lower().endswith(_OTHER_WEIGHTS):
            is_asked_for = may_be and path in globs
        else:
            is_asked_for = may_be and any(fnmatchcase(path, glob) for glob in globs)
        if info.name in known or is_asked_for:
            yield path, store, info


def _snapshot(name: str, revision: str | None, also: Sequence[str]) -> Path:
    """Return the cache folder of the model's files, downloading missing files."""
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise OptionError(
            f"hf: folder {name} not found; for a model of the hub, install huggingface_hub", path=name
        ) from None
    try:
        known = [pattern for one in sorted(HF_NAMES) for pattern in (one, f"*/{one}")]
        wanted = [*known, f"{_CHAT_TEMPLATES}/*.jinja", *also]
        found = hub.snapshot_download(name, revision=revision, allow_patterns=wanted)
    except (OSError, ValueError) as error:  # includes a failed connection and invalid names
        raise CheckpointNotFoundError(
            f"hf: neither a folder {name} nor a model of this name on the hub was found: {error}", path=name
        ) from error
    return Path(found)
