"""A plugin that runs a part of the tests: ``pytest --shard=1/4``, the first of four parts, by whole files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["shard_of"]


def shard_of(sizes: Mapping[str, int], count: int) -> Mapping[str, int]:
    """The shard of each file, from 1 on: the largest first, each to that which has least so far."""
    filled, shards = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = filled.index(min(filled))
        filled[smallest] += sizes[name]
        shards[name] = smallest + 1
    return shards


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--shard", metavar="N/M", default="", help="run the Nth of M parts, by whole files")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """By the number of tests that are chosen, so that -m and -k come first; alike in each worker."""
    if not (wanted := config.getoption("shard")):
        return
    number, count = _parsed(wanted)
    shards = shard_of(_sizes(items), count)
    left = [item for item in items if shards[item.path.as_posix()] != number]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if shards[item.path.as_posix()] == number]


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
