"""A tensor's digest as it is shown and compared: of the sum over its bytes, its dtype and its shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["SUM_BYTES", "digest_of_all", "shown_digest"]

SUM_BYTES: Final = 16

_HEAD: Final = b"dcphub tensor digest 1\n"
_HEAD_OF_ALL: Final = b"dcphub digest of tensors 1\n"


def shown_digest(total: bytes, dtype: str, shape: Sequence[int]) -> str:
    """32 hexadecimal digits: equal bytes of another dtype or shape have others."""
    facts = f"{dtype}\n{','.join(map(str, shape))}\n".encode()
    return hashlib.blake2b(_HEAD + facts + total, digest_size=SUM_BYTES).hexdigest()


def digest_of_all(named: Iterable[tuple[str, str]]) -> str:
    """Return one for many tensors, by their names and digests, in whatever order."""
    lines = sorted(f"{digest} {fqn}\n".encode("utf-8", "surrogatepass") for fqn, digest in named)
    return hashlib.blake2b(_HEAD_OF_ALL + b"".join(lines), digest_size=SUM_BYTES).hexdigest()
