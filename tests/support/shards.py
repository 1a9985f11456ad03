"""A plugin that runs a part of the tests: ``pytest --shard=1/4``, the first of four parts, by whole files.

Folders alternate in the order of tests: otherwise all workers would reach tests that wait at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["shard_of"]


def shard_of(sizes: Mapping[str, int], count: int) -> Mapping[str, int]:
    """Return the shard of each file, from 1 on: large files first, each to the smallest shard so far."""
    filled, shards = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = filled.index(min(filled))
        filled[smallest] += sizes[name]
        shards[name] = smallest + 1
    return shards


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--shard", metavar="N/M", default="", help="run the Nth of M parts, by whole files")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the shard's files by the numbers of tests left after -m and -k, equally in each worker."""
    if wanted := config.getoption("shard"):
        number, count = _parsed(wanted)
        shards = shard_of(_sizes(items), count)
        left = [item for item in items if shards[item.path.as_posix()] != number]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if shards[item.path.as_posix()] == number]
    places = _places([item.path for item in items])
    items.sort(key=lambda item: places[item.path])


def _places(paths: Sequence[Path]) -> Mapping[Path, float]:
    """Return the relative position of each file in its folder."""
    folders: dict[Path, dict[Path, None]] = {}
    for path in paths:
        folders.setdefault(path.parent, {})[path] = None
    return {path: (n + 0.5) / len(files) for files in folders.values() for n, path in enumerate(files)}


def _parsed(wanted: str) -> tuple[int, int]:
    number, slash, count = wanted.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard={wanted}: write 1/4 for the first of four")
    return int(number), int(count)


def _sizes(items: Sequence[pytest.Item]) -> Mapping[str, int]:
    sizes: dict[str, int] = {}
    for item in items:
        name = Path(item.path).as_posix()
        sizes[name] = sizes.get(name, 0) + 1
    return sizes
