"""What errors of fsspec's file systems mean for the next attempt.

Each package has errors of its own, and none of these is imported here. They are told by what they have in
common: Python's own types, a status of HTTP that they carry, and words in the names of their types.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from typing import Final

from dcp.storage.stores.objects.client import Failure, RequestError, is_unresolved

__all__ = ["as_request_error"]

_MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_FINAL: Final = (NotImplementedError, TypeError, ValueError, AttributeError)
"""What does not depend on the service."""

_REFUSED_NAME: Final = re.compile(r"Auth|Credential|AccessDenied|Forbidden|Permission|TokenNotFound")
_REFUSED_TEXT: Final = re.compile(
    r"(Forbidden|Unauthorized|Access ?Denied|Permission denied)\b", re.IGNORECASE
)
_FINAL_NAMES: Final = frozenset({"OfflineModeIsEnabled", "error_perm"})
"""Of huggingface_hub, and of ftplib: the answers 500 to 599 to a command."""
_PASSING_NAMES: Final = frozenset({"TransportError"})
"""Of google.auth, all of whose errors are of a type with "Auth" in its name: the network failed."""

_REFUSED_STATUS: Final = frozenset({401, 403, 407})
_MISSING_STATUS: Final = frozenset({404, 410})
_PASSING_STATUS: Final = frozenset({408, 409, 412, 425, 429})
"""409 and 412 are those of other writers: where a file must not be there `FileExistsError` says so."""

_FULL_ERRNO: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FINAL_ERRNO: Final = frozenset({errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTSUP})
_LONGEST_CHAIN: Final = 8


def as_request_error(error: Exception, place: str) -> RequestError:
    """``error`` of one attempt in the file system ``place`` as a `RequestError`. What is not known to be
    settled may pass."""
    text = f"{type(error).__name__}: {error}"
    chain = list(_chain(error))
    if isinstance(error, _MISSING):
        unanswered = next(filter(_is_of_the_network, chain), None)
        if unanswered is None:
            return RequestError(Failure.MISSING, text)
        text = f"{type(unanswered).__name__}: {unanswered}"
        return RequestError(Failure.PASSING, text, is_unresolved=is_unresolved(unanswered))
    if any(isinstance(one, ImportError) for one in chain):
        return RequestError(Failure.FINAL, f"{text} (install the package that {place} needs)")
    status = next((found for one in chain if (found := _status(one))), 0)
    if status in _REFUSED_STATUS or (not status and _is_refusal(chain)):
        return RequestError(
            Failure.FINAL,
            f"{text} (credentials are missing, wrong, or not allowed to do this: give them as "
            f"storage_options, or as the package of {place} looks for them)",
        )
    kind = _of_status(status) if status else _of_type(error)
    return RequestError(kind, text, is_unresolved=is_unresolved(error))


def _is_of_the_network(error: BaseException) -> bool:
    """Whether there was no answer at all: fsspec's HTTP says of that, too, that there is no such file."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or "ClientConnectionError" in names


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    next_one: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if next_one is None:
            return
        yield next_one
        next_one = next_one.__cause__


def _status(error: BaseException) -> int:
    """The status of HTTP that an error carries, 0 without any that is one of a failure."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and re.fullmatch(r"[45]\d\d", str(value)):
                return int(value)
    return 0


def _of_status(status: int) -> Failure:
    if status in _MISSING_STATUS:
        return Failure.MISSING
    if status == 416:
        return Failure.RANGE
    if status == 507:
        return Failure.FULL
    return Failure.FINAL if status < 500 and status not in _PASSING_STATUS else Failure.PASSING


def _is_refusal(chain: list[BaseException]) -> bool:
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    if names & _PASSING_NAMES or any(getattr(one, "retryable", False) is True for one in chain):
        return False
    if any(map(_REFUSED_NAME.search, names)):  # PermissionError is one
        return True
    return any(isinstance(one, OSError) and _REFUSED_TEXT.match(str(one)) for one in chain)


def _of_type(error: Exception) -> Failure:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL_ERRNO:
        return Failure.FULL
    if isinstance(error, json.JSONDecodeError):  # an answer that is not the service's
        return Failure.PASSING
    if {kind.__name__ for kind in type(error).__mro__} & _FINAL_NAMES:
        return Failure.FINAL
    return Failure.FINAL if isinstance(error, _FINAL) or number in _FINAL_ERRNO else Failure.PASSING
