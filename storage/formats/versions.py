"""Files that say which version of a format they have: data of a newer dcphub are distinguished from
damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dcp.storage.errors import CheckpointFormatError, UnsupportedFormatError

__all__ = ["reading_version"]


@contextmanager
def reading_version(version: Any, known: tuple[int, int], what: str) -> Iterator[None]:
    """Decode, within this block, ``what`` of version ``version``, whose bytes are those that were written.

    ``known`` is the reader's own. UnsupportedFormatError for another major version, and for what cannot be
    decoded of a later minor one; CheckpointFormatError for what is no version.
    """
    if not isinstance(version, list) or list(map(type, version)) != [int, int]:
        raise CheckpointFormatError(f"{what} has no version")
    found = (version[0], version[1])
    text = f"{what} has format version {found[0]}.{found[1]}, and this dcphub knows {known[0]}.{known[1]}"
    if found[0] != known[0]:
        age = "newer" if found > known else "older"
        raise UnsupportedFormatError(f"{text}: it was written by a {age} dcphub; use one", version=version)
    try:
        yield
    except UnsupportedFormatError:
        raise
    except CheckpointFormatError as error:
        if found <= known:
            raise
        raise UnsupportedFormatError(
            f"{text}: it was written by a newer dcphub, and not all of it is known here ({error}); use a "
            "newer one",
            **(error.facts | {"version": version}),
        ) from error
