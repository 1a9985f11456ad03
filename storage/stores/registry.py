"""Which kind of store a URL is of, by its scheme.

Ours are declared beside each store (`STORE_TYPE`). Others are registered by `register_store`, or by a package
whose metadata names them: the entry point group `dcphub.stores`, with a name for each scheme. These are read
when a scheme is asked for that is none of ours. Whatever is left is for fsspec to know.
"""

from __future__ import annotations

import re
from typing import Final

from dcp.storage.errors import OptionError, StorageError
from dcp.storage.extensions import loaded_extension
from dcp.storage.stores import memory
from dcp.storage.stores.base import StoreType
from dcp.storage.stores.objects import store_type as objects
from dcp.storage.stores.posix import store as posix

__all__ = ["GROUP", "known_schemes", "register_store", "store_type_of"]

GROUP: Final = "dcphub.stores"

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.\-]*")
_BY_SCHEME: Final[dict[str, StoreType]] = {
    scheme: store_type
    for store_type in (posix.STORE_TYPE, memory.STORE_TYPE, objects.STORE_TYPE)
    for scheme in store_type.schemes
}
_OURS: Final = frozenset(_BY_SCHEME)


def register_store(store_type: StoreType) -> None:
    """Let URLs of ``store_type.schemes`` be opened by it, in this process; the last one registered counts.

    OptionError for what is no StoreType; StorageError for schemes that are ours, no schemes, or not in a
    tuple: those of a string would be its letters.
    """
    if not isinstance(store_type, StoreType):
        raise OptionError(f"a {type(store_type).__name__} is no StoreType: {store_type!r:.200}")
    schemes = store_type.schemes
    if not isinstance(schemes, tuple) or not schemes:
        raise StorageError(f"schemes of a store must be a tuple: ('zip',), not {schemes!r}", op="register")
    for scheme in schemes:
        if not isinstance(scheme, str) or scheme in _OURS or not _SCHEME.fullmatch(scheme):
            raise StorageError(f"{scheme!r} is no scheme that a store could be registered for", op="register")
    _BY_SCHEME.update(dict.fromkeys(store_type.schemes, store_type))


def store_type_of(scheme: str) -> StoreType:
    """The kind of store of a scheme in lower case; that of object services where nobody else has registered
    it."""
    if scheme not in _BY_SCHEME:
        found = loaded_extension(GROUP, scheme)
        if found is not None and not (isinstance(found, StoreType) and scheme in found.schemes):
            raise StorageError(
                f"the entry point {scheme} of the group {GROUP} is no StoreType of that scheme: "
                f"{found!r:.200}",
                op="open",
            )
        _BY_SCHEME[scheme] = objects.STORE_TYPE if found is None else found
    return _BY_SCHEME[scheme]


def known_schemes() -> list[str]:
    """The schemes that were registered or asked for so far, sorted."""
    return sorted(_BY_SCHEME)
