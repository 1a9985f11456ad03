"""What ``config.json`` says of a model, as expressions of sizes have its names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dcp.storage.errors import OptionError
from dcp.storage.stores.base import Store

__all__ = ["CONFIG", "MAX_CONFIG_BYTES", "config_at", "config_of", "model_config"]

CONFIG: Final[str] = "config.json"
MAX_CONFIG_BYTES: Final = 4 << 20


def model_config(store: Store) -> Mapping[str, Any]:
    """Of the file beside a checkpoint's weights; empty where there is none. OptionError as of `config_of`."""
    if store.stat(CONFIG) is None:
        return {}
    return config_of(store.read(CONFIG, limit_bytes=MAX_CONFIG_BYTES), f"{CONFIG} of {store.url}")


def config_at(path: Path) -> Mapping[str, Any]:
    """Of a file, or a model's folder. OptionError if it cannot be read, and as of `config_of`."""
    path = path / CONFIG if path.is_dir() else path
    try:
        with path.open(encoding="utf-8") as file:
            return config_of(file.read(MAX_CONFIG_BYTES), str(path))
    except OSError as error:
        raise OptionError(f"config: {path} cannot be read: {error.strerror}") from error


def config_of(text: str | bytes, where: str) -> Mapping[str, Any]:
    """A model's configuration of JSON; of one with a text model within, that has the first word.

    OptionError for anything else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{where} is no table")
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else found
