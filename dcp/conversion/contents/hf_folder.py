"""What stands beside weights in a folder of Hugging Face, from a template: a folder, or a model of the hub.

Known names alone are taken, and what is asked for: a stranger's template adds neither code nor weights, and
its links lead to no file outside of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from dcp.planners.weight_maps.model_config import CONFIG, MAX_CONFIG_BYTES
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError, OptionError
from dcp.storage.formats.opening.sources import index_of_folder
from dcp.storage.formats.registry import formats
from dcp.storage.stores.base import FileInfo, Store
from dcp.storage.stores.names import place_text
from dcp.storage.stores.opening import OpenWith
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["ADAPTER_CONFIG", "HF_NAMES", "HfFolder", "hf_folder_of", "read_hf_folder"]

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
"""What ``from_pretrained`` of models, tokenizers and processors reads beside weights."""

_MAX_FILE_BYTES: Final = 64 << 20
_MAX_BYTES: Final = 128 << 20
_HUB_NAME: Final = re.compile(r"(?P<name>[\w.-]{1,96}(/[\w.-]{1,96})?)(@(?P<revision>[\w./-]{1,128}))?")


@dataclass(frozen=True, eq=False)
class HfFolder:
    """The ``files`` of a template at ``url`` that stand beside weights, and the names of its tensors, if it
    has weights as well."""

    url: str
    files: Mapping[str, bytes]
    tensor_names: frozenset[str] = frozenset()

    @property
    def is_adapter(self) -> bool:
        """Whether it is one of PEFT's, whose weights have a file and names of their own."""
        return ADAPTER_CONFIG in self.files

    @cached_property
    def config(self) -> dict[str, Any]:
        """What its ``config.json`` says; empty where there is none."""
        text = self.files.get(CONFIG, b"{}")
        try:
            found = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CheckpointFormatError(f"{CONFIG} of {self.url} is no JSON object", path=self.url)
        return found

    def files_for(self, dtype: str | None) -> Mapping[str, bytes]:
        """`files`, where all floating-point weights are of ``dtype``: the configuration says so, because a
        model is made in the dtype that stands there."""
        named = [key for key in ("dtype", "torch_dtype") if isinstance(self.config.get(key), str)]
        if dtype is None or all(self.config[key] == dtype for key in named):
            return self.files
        told = self.config | dict.fromkeys(named, dtype)
        return {**self.files, CONFIG: (json.dumps(told, indent=2) + "\n").encode()}


def read_hf_folder(template: str | os.PathLike[str], also: Sequence[str] = ()) -> HfFolder:
    """The template at a path or URL, or of the model ``ORGANISATION/NAME[@REVISION]`` of the hub, from its
    cache or by download. ``also`` are globs of further files to be copied.

    Raises OptionError where there is none, where a glob matches nothing and for too much;
    CheckpointFormatError for a configuration that is none.
    """
    return hf_folder_of(_store_of(template, also), also)


def hf_folder_of(store: Store, also: Sequence[str] = ()) -> HfFolder:
    """As `read_hf_folder`, of a folder that is open."""
    listing = [info for info in store.list() if _is_wanted(info.name, also)]
    names = {info.name for info in listing}
    if not names & {CONFIG, ADAPTER_CONFIG}:
        raise OptionError(
            f"hf: {store.url} has neither {CONFIG} nor {ADAPTER_CONFIG}, or only links out of it",
            path=store.url,
        )
    idle = [glob for glob in also if not any(fnmatchcase(name, glob) for name in names)]
    if idle:
        raise OptionError(f"hf_also: {', '.join(map(repr, idle))} match no file of {store.url} but weights")
    _check_sizes(store, listing)
    files = {info.name: store.read(info.name, limit_bytes=_MAX_FILE_BYTES) for info in listing}
    folder = HfFolder(store.url, files, _tensor_names(store))
    _ = folder.config  # which is looked at before anything is written
    return folder


def _is_wanted(name: str, also: Sequence[str]) -> bool:
    if name in HF_NAMES:
        return True
    if name.startswith(".") or is_commit_object(name) or any(one.is_in_folder(name) for one in formats()):
        return False  # it would be a checkpoint of its own, or weights among ours
    return any(fnmatchcase(name, glob) for glob in also)


def _check_sizes(store: Store, listing: Sequence[FileInfo]) -> None:
    large = [info.name for info in listing if info.size_bytes > _MAX_FILE_BYTES]
    total = sum(info.size_bytes for info in listing)
    if large or total > _MAX_BYTES:
        told = f"{', '.join(large)} of it are larger than {_MAX_FILE_BYTES} bytes" if large else ""
        raise OptionError(
            f"hf: {store.url} is no template: {told or f'{total} bytes are beside its weights'}",
            path=store.url,
        )


def _tensor_names(store: Store) -> frozenset[str]:
    """Of its weights, to compare with; a template needs none, nor all of them."""
    try:
        index = index_of_folder(store)
    except CheckpointError:
        return frozenset()
    return frozenset() if index is None else frozenset(index.fqns)


def _store_of(template: str | os.PathLike[str], also: Sequence[str]) -> Store:
    text = place_text(template)
    if "://" in text:
        return OpenWith()(text)
    if Path(text).is_dir():
        return _local(Path(text))
    match = _HUB_NAME.fullmatch(text)
    if match is None:
        raise OptionError(f"hf: {text} is no folder, and no name of a model", path=text)
    return _local(_snapshot(match["name"], match["revision"], also))


def _local(folder: Path) -> Store:
    """Links are read if they stay in the folder or, in a cache of the hub, lead to that model's files."""
    real = folder.resolve()
    return PosixStore(real, links_within=real.parents[1] if real.parent.name == "snapshots" else real)


def _snapshot(name: str, revision: str | None, also: Sequence[str]) -> Path:
    """The folder of the cache that has the model's files, which are fetched if they are not there."""
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise OptionError(
            f"hf: there is no folder {name}; for models of the hub install huggingface_hub", path=name
        ) from None
    try:
        found = hub.snapshot_download(name, revision=revision, allow_patterns=[*sorted(HF_NAMES), *also])
    except (OSError, ValueError) as error:  # also of no connection, and of a name that none can have
        raise CheckpointNotFoundError(
            f"hf: there is no folder {name}, nor does the hub give a model of that name: {error}", path=name
        ) from error
    return Path(found)
