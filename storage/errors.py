"""Every error the package raises on purpose.

CheckpointError (Exception)
├── CheckpointNotFoundError      no committed checkpoint under that id
├── CheckpointConflictError      another writer published to the id first
├── CheckpointFormatError        the bytes are not what the format allows
│   ├── UnsafeObjectError        a pickle wants something outside the allow-list
│   └── UnsupportedFormatError   recognised, but not readable by this version
├── CorruptCheckpointError       bytes differ from what was committed
├── PlanError                    the plan of a save or load is not valid
│   ├── OptionError              an argument or option that cannot be
│   ├── MissingKeyError          the state dict wants keys the checkpoint lacks
│   ├── UnexpectedKeyError       the checkpoint has keys that the state dict has no place for
│   ├── ShapeMismatchError
│   ├── DtypeMismatchError
│   └── ReplicaMismatchError     one name, different data on different ranks
├── StorageError                 an operation of a store failed
│   └── StorageFullError         no space or quota left
├── CollectiveTimeoutError       ranks did not answer in time
├── StagingError                 a staged copy is not what the state was when it was taken
├── SaveAbortedError             the save was called off
└── WriterProcessError           the process that writes in the background died or cannot be started

Errors carry facts: typed attributes (`fqn`, `path`, `rank`, `committed`, ...), given by keyword. They travel
between ranks as plain data (`error_to_wire`, `error_from_wire`), so no pickle is needed for another rank's.
This module imports neither torch nor another module of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

__all__ = [
    "CheckpointConflictError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "CollectiveTimeoutError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "MissingKeyError",
    "OptionError",
    "PlanError",
    "RemoteError",
    "ReplicaMismatchError",
    "SaveAbortedError",
    "ShapeMismatchError",
    "StagingError",
    "StorageError",
    "StorageFullError",
    "UnexpectedKeyError",
    "UnsafeObjectError",
    "UnsupportedFormatError",
    "WriterProcessError",
]


class CheckpointError(Exception):
    """Base of all errors of this package.

    The message says what happened, where, and what to do. What is known besides is in attributes, and has
    their default where it is not: plain data only (str, int, float, bool, None, lists and dicts of these).
    """

    alternative: str = ""
    """What the ``argument`` would do instead; the message has both."""
    argument: str = ""
    """An argument in Python, such as "overwrite=True", that lets it pass."""
    committed: bool = False
    """Whether the checkpoint is committed all the same: what failed came after that."""
    fqn: str = ""
    fqns: Sequence[str] = ()
    key: str = ""
    """Of a nested state dict, or of an object store."""
    path: str = ""
    rank: int | None = None
    """The rank that it is about."""
    step: int | str | None = None
    """The step of a run; of an error that several ranks raise, the step of the operation."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        self.__dict__.update(facts)
        if self.argument and self._ending not in message:  # an error of a rank has it in the middle
            message += self._ending
        super().__init__(message)

    @property
    def finding(self) -> str:
        """Return the message without what an argument would do: for whoever asked in another way."""
        return str(self).replace(self._ending, "", 1)

    @property
    def _ending(self) -> str:
        if not self.argument:
            return ""
        name, _, value = self.argument.partition("=")
        flag = f" (--{name.replace('_', '-')})" if value == "True" else ""
        return f", or {self.alternative} with {self.argument}{flag}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the attributes that are known, by name."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.facts), self._notes)

    @property
    def _notes(self) -> dict[str, Any] | None:
        notes = getattr(self, "__notes__", None)
        return {"__notes__": notes} if notes else None


def _rebuild(cls: type[CheckpointError], message: str, facts: dict[str, Any]) -> CheckpointError:
    return cls(message, **facts)


class CheckpointNotFoundError(CheckpointError):
    """No committed checkpoint exists under the id."""

    data_files: int | None = None
    """How many data files are there without a commit."""


class CheckpointConflictError(CheckpointError):
    """Another writer published to the same id since this save began; nothing of this save remains."""


class CheckpointFormatError(CheckpointError, ValueError):
    """Bytes that no correct writer of the format produces: hostile, or damaged beyond a checksum's help."""

    global_name: str = ""
    """The class or function that a pickle names."""
    limit_bytes: int | None = None
    name: str = ""
    position: int | None = None
    """Where in the bytes."""
    size_bytes: int | None = None


class UnsafeObjectError(CheckpointFormatError):
    """A pickle names a class or function outside the allow-list. Nothing of it was run."""


class UnsupportedFormatError(CheckpointFormatError):
    """The format is recognised, but this version cannot read it."""

    element_type: str = ""
    protocol: int | None = None
    tensor_kind: str = ""
    version: int | str | None = None


class CorruptCheckpointError(CheckpointError):
    """Stored bytes differ from the committed ones: checksum, length or a missing file."""

    offset: int | None = None
    reasons: Sequence[str] = ()
    """Why the ``steps`` of a run cannot be restored, one each."""
    size_bytes: int | None = None
    steps: Sequence[int] = ()
    wanted_bytes: int | None = None


class PlanError(CheckpointError, ValueError):
    """A save or load plan that cannot be carried out: overlap, gap, out of bounds, wrong kind."""

    depth: int | None = None
    expected: int | None = None
    got: int | None = None
    patterns: Sequence[str] = ()
    problems: Sequence[str] = ()
    ranks: Sequence[int] = ()
    saving: bool = False
    """Whether some of the ranks that are not about the same have begun to save."""
    type_name: str = ""


def check_flags(**flags: object) -> None:
    """Raise OptionError for text where True or False is expected: "no" would count as True."""
    for name, value in flags.items():
        if isinstance(value, str):
            raise OptionError(f"{name} must be True or False, not {value!r}")


def check_numbers(**numbers: object) -> None:
    """Raise OptionError for what is neither None nor a number."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise OptionError(f"{name} must be a number, not {value!r}")


class OptionError(PlanError, TypeError):
    """An argument or an option that cannot be: of a wrong type, out of its range, or not with another one."""


class MissingKeyError(PlanError, KeyError):
    """The state dict asks for keys which the checkpoint does not have."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return Exception.__str__(self)


class UnexpectedKeyError(PlanError):
    """The checkpoint has keys below those that were asked for which no rank's state dict has a place for."""

    lost: Sequence[str] = ()
    """All of them; ``fqns`` has the first."""


class ShapeMismatchError(PlanError):
    """A tensor's global shape differs between state dict and checkpoint."""


class DtypeMismatchError(PlanError, TypeError):
    """A tensor's dtype differs between state dict and checkpoint, and no cast was asked for."""


class ReplicaMismatchError(PlanError):
    """Ranks hold different data under one name; storing one of them would lose the others silently."""


class StorageError(CheckpointError, OSError):
    """An operation of a store failed; the cause is chained. ``errno`` is the operating system's, if it was
    that."""

    attempts: int | None = None
    bucket: str = ""
    op: str = ""
    """The operation, such as "put"."""
    published: bool = False
    """Whether the file has its new content all the same, which may not outlast a power cut."""
    timeout_seconds: float | None = None

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message, **facts)
        self.errno = facts.get("errno")

    def __str__(self) -> str:
        return Exception.__str__(self)


class StorageFullError(StorageError):
    """No space or quota left on the store."""


class CollectiveTimeoutError(CheckpointError, TimeoutError):
    """Ranks did not take part in a step in time; ``ranks`` are those that gave no sign of life."""

    ranks: Sequence[int] = ()
    reporting_rank: int | None = None

    def __str__(self) -> str:
        return Exception.__str__(self)


class StagingError(CheckpointError):
    """A staged copy differs from its source: the state changed while it was being copied, or a stale copy was
    about to be saved; ``fqns`` names the first of the ``count`` tensors."""

    count: int | None = None
    kind: str = ""


class SaveAbortedError(CheckpointError):
    """The save was called off before it committed; nothing of it remains."""


class WriterProcessError(CheckpointError):
    """The process that writes in the background died, did not start, or cannot take what it was given.

    Unless ``committed`` says so, it is not known whether its save committed: look at the id.
    """


class RemoteError(CheckpointError):
    """An exception of another rank that is none of this package: `type_name`, and `traceback_text` from
    there."""

    traceback_text: str = ""
    type_name: str = ""


_BY_NAME: dict[str, type[CheckpointError]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, CheckpointError)
}


def error_to_wire(error: BaseException, traceback_text: str) -> dict[str, Any]:
    """Return plain data (msgpack-able) that describes ``error``; ``traceback_text`` is its formatted
    traceback."""
    for cls in type(error).__mro__:
        if isinstance(error, CheckpointError) and _BY_NAME.get(cls.__name__) is cls:
            name, message, facts = cls.__name__, str(error), error.facts
            break
    else:
        name, message = "RemoteError", f"{type(error).__name__}: {error}"
        facts = {"type_name": type(error).__qualname__, "traceback_text": traceback_text}
    return {"class": name, "message": message, "facts": facts, "traceback": traceback_text}


def error_from_wire(wire: dict[str, Any]) -> CheckpointError:
    """Return the inverse of `error_to_wire`; unknown classes become `CheckpointError`."""
    cls = _BY_NAME.get(wire["class"], CheckpointError)
    return cls(wire["message"], **wire["facts"])
