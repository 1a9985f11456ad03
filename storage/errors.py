"""Errors of the package.

CheckpointError (Exception)
├── CheckpointNotFoundError      no committed checkpoint at the id
├── CheckpointConflictError      another writer published to the id first
├── CheckpointFormatError        invalid bytes
│   ├── UnsafeObjectError        a pickle names a class outside the allow-list
│   └── UnsupportedFormatError   known format, not readable by this version
├── CorruptCheckpointError       bytes differ from the committed bytes
├── PlanError                    invalid plan of a save or load
│   ├── OptionError              invalid argument or option
│   ├── MissingKeyError          keys missing in the checkpoint
│   ├── UnexpectedKeyError       keys missing in the state dict
│   ├── ShapeMismatchError
│   ├── DtypeMismatchError
│   └── ReplicaMismatchError     different data on different ranks
├── StorageError                 a store operation failed
│   └── StorageFullError         no space or quota left
├── CollectiveTimeoutError       ranks did not answer in time
├── StagingError                 a staged copy differs from its source
├── SaveAbortedError             the save was cancelled
└── WriterProcessError           the background writer process died or did not start

Errors carry facts as typed attributes (`fqn`, `path`, `rank`, `committed`, ...), given by keyword. Errors
travel between ranks as plain data (`error_to_wire`, `error_from_wire`), without pickle. This module
imports neither torch nor another module of this package.
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
    """Base class of all errors of this package.

    The message says what happened, where, and how to proceed. Facts are in attributes with plain data (str,
    int, float, bool, None, lists and dicts); unknown facts have defaults.
    """

    alternative: str = ""
    """Effect of ``argument``, also part of the message."""
    argument: str = ""
    """Argument in Python that avoids the error, such as "overwrite=True"."""
    committed: bool = False
    """True if the checkpoint was committed before the failure."""
    fqn: str = ""
    """Name of the tensor or value."""
    fqns: Sequence[str] = ()
    """Names of tensors or values; long lists are cut."""
    key: str = ""
    """Key of a nested state dict or of an object store."""
    path: str = ""
    """Path or URL of the file or checkpoint."""
    rank: int | None = None
    """Rank of the failure."""
    step: int | str | None = None
    """Step of a run; for an error of several ranks, the step of the operation."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        self.__dict__.update(facts)
        if self.argument and self._ending not in message:  # errors of other ranks already contain the ending
            message += self._ending
        super().__init__(message)

    @property
    def finding(self) -> str:
        """Message without the advice about an argument."""
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
        """Known attributes by name."""
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
    """No committed checkpoint exists at the id.

    Check the path: for a run, pass the folder of a step or use `CheckpointManager.restore`. If the save was
    killed before its commit, load an earlier step.
    """

    data_files: int | None = None
    """Number of data files without a commit."""


class CheckpointConflictError(CheckpointError):
    """Another process writes to the same place.

    A save found that another writer published to the id since the save began; nothing of this save remains.
    Use one id for each save. A load or verification found that the checkpoint was replaced while it was read:
    repeat it. A conversion found an existing target: choose another one, or pass ``overwrite=True``.
    """


class CheckpointFormatError(CheckpointError, ValueError):
    """Invalid bytes that no correct writer produces.

    The file is damaged, or is not what its name says. Restore it from a copy, or load another checkpoint.
    """

    global_name: str = ""
    """Class or function named by a pickle."""
    limit_bytes: int | None = None
    name: str = ""
    position: int | None = None
    """Position in the bytes."""
    size_bytes: int | None = None


class UnsafeObjectError(CheckpointFormatError):
    """A pickle names a class or function outside of the allow-list. Nothing was run.

    If the source is trusted, allow the class with ``torch.serialization.add_safe_globals`` or load with
    ``weights_only=False``. Otherwise leave the entry out with ``exclude=``.
    """


class UnsupportedFormatError(CheckpointFormatError):
    """A known format that this version cannot read.

    The message names the feature or version. Upgrade dcphub or use the version of torch that wrote the file,
    or save the entry again as a dense tensor.
    """

    element_type: str = ""
    """Element type of a safetensors file."""
    protocol: int | None = None
    """Pickle protocol."""
    tensor_kind: str = ""
    """Layout of the tensor, such as "sparse"."""
    version: int | str | None = None
    """Version of the format."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes differ from the committed bytes: checksum, length or a missing file.

    Restore the file from a copy, or load another step; `CheckpointManager.restore` does so by itself.
    ``dcp verify`` lists all damage. Other tensors can be loaded with ``exclude=``.
    """

    offset: int | None = None
    """Position of the damaged block in the file, in bytes."""
    reasons: Sequence[str] = ()
    """Reasons why the ``steps`` of a run cannot be restored, one per step."""
    size_bytes: int | None = None
    """Present size of the file."""
    steps: Sequence[int] = ()
    """Steps of a run that cannot be restored."""
    wanted_bytes: int | None = None
    """Size of the file up to which the checkpoint has data."""


class PlanError(CheckpointError, ValueError):
    """Invalid plan of a save or load: overlap, gap, out of bounds, or wrong kind.

    Also patterns without a match, and ranks that call different operations. Call the function with the same
    arguments on every rank; from a planner of your own, return plans that cover each tensor once.
    """

    expected: int | None = None
    """Size of the payload in the plan, in bytes."""
    got: int | None = None
    """Size of the payload written, in bytes."""
    patterns: Sequence[str] = ()
    """Patterns without a match."""
    problems: Sequence[str] = ()
    """Problems of the plan, one text each; long lists are cut."""
    ranks: Sequence[int] = ()
    """Ranks that differ from the others."""
    saving: bool = False
    """True if some ranks have begun a save while others called another operation."""


def check_flags(**flags: object) -> None:
    """Raise OptionError for text in place of True or False, because "no" would count as True."""
    for name, value in flags.items():
        if isinstance(value, str):
            raise OptionError(f"{name} must be True or False, not {value!r}")


def check_numbers(**numbers: object) -> None:
    """Raise OptionError for values other than None and numbers."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise OptionError(f"{name} must be a number, not {value!r}")


class OptionError(PlanError, TypeError):
    """Invalid argument or option: wrong type, out of range, or wrong combination.

    The message names the argument and the allowed values.
    """


class MissingKeyError(PlanError, KeyError):
    """Keys of the state dict are missing in the checkpoint.

    The message suggests ``rename=`` where names differ by a prefix. Pass ``allow_partial_load=True`` to leave
    new entries unchanged, ``only=`` to load a part, or ``per_rank="keep"`` if `PerRank` values of a rank are
    missing.
    """

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return Exception.__str__(self)


class UnexpectedKeyError(PlanError):
    """Keys of the checkpoint have no place in any rank's state dict.

    Build the model that was saved, or leave the entries out with ``exclude=`` or ``unexpected="ignore"``.
    """

    lost: Sequence[str] = ()
    """All unexpected keys; ``fqns`` has the first."""


class ShapeMismatchError(PlanError):
    """The global shape of a tensor differs between state dict and checkpoint.

    Check the model's configuration. For padded, fused or transposed weights pass ``map=``.
    """


class DtypeMismatchError(PlanError, TypeError):
    """The dtype of a tensor differs between state dict and checkpoint, without a requested cast.

    Pass ``dtype="cast"`` to convert, or build the model with the stored dtype.
    """


class ReplicaMismatchError(PlanError):
    """Ranks hold different data under one name; only one of them could be stored.

    Synchronize the values before the save, or wrap values that differ by rank in `PerRank`. A checkpoint
    saved with ``use_collectives=False`` may need as many ranks as saved it.
    """


class StorageError(CheckpointError, OSError):
    """A store operation failed; the cause is chained. ``errno`` is set for operating system errors.

    Check the path or URL, the permissions or credentials, and the network. Requests to object stores were
    repeated before the error. Repeat the save or load after the repair: nothing was committed, unless
    ``committed`` is set.
    """

    attempts: int | None = None
    """Number of requests, repetitions included."""
    bucket: str = ""
    """Bucket or place of an object store."""
    op: str = ""
    """Operation, such as "put"."""
    published: bool = False
    """True if the file has its new content, which may not survive a power cut."""
    timeout_seconds: float | None = None
    """Time limit of the operation."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message, **facts)
        self.errno = facts.get("errno")

    def __str__(self) -> str:
        return Exception.__str__(self)


class StorageFullError(StorageError):
    """Space or quota of the store is exhausted.

    Free space or raise the quota, and save again. `Retention` deletes old steps; ``dcp gc`` removes files
    of killed saves.
    """


class CollectiveTimeoutError(CheckpointError, TimeoutError):
    """Ranks did not answer in time; ``ranks`` lists the silent ranks.

    All ranks of the process group must call the function. Look for an earlier error on the silent ranks.
    If one has died, restart the job from the last committed checkpoint: the process group cannot be used any
    more. Raise ``timeout_seconds`` for slow ranks.
    """

    ranks: Sequence[int] = ()
    """Ranks that did not answer."""
    reporting_rank: int | None = None
    """Rank that waited."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class StagingError(CheckpointError):
    """A staged copy differs from its source, because the state changed during the copy or the copy is
    stale; ``fqns`` names the first of ``count`` tensors.

    Let nothing write to the state before ``staging_completion`` of the save, or hold the stager's ``lock()``
    around ``optimizer.step()``. A stager of your own must copy every tensor, with its attributes.
    """

    count: int | None = None
    """Number of tensors."""


class SaveAbortedError(CheckpointError):
    """The save was cancelled before the commit; nothing remains. Save again if the checkpoint is needed."""


class WriterProcessError(CheckpointError):
    """The background writer process died, did not start, or cannot accept its input.

    Unless ``committed`` is set, the outcome of the save is unknown: check the id. The next save starts a new
    process. If the process was killed, check the memory of the machine. If it cannot accept its input, define
    classes at the top level of an importable module, or save with ``AsyncCheckpointerType.THREAD``.
    """


class RemoteError(CheckpointError):
    """Exception of another rank that is no `CheckpointError`, such as one of the model's ``state_dict()``.

    The remedy depends on that exception: see its traceback.
    """

    traceback_text: str = ""
    """Traceback of the exception."""
    type_name: str = ""
    """Class of the exception."""


_BY_NAME: dict[str, type[CheckpointError]] = {
    name: value
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, CheckpointError)
}


def error_to_wire(error: BaseException, traceback_text: str) -> dict[str, Any]:
    """Return ``error`` as plain data for msgpack, with a formatted traceback."""
    for cls in type(error).__mro__:
        if isinstance(error, CheckpointError) and _BY_NAME.get(cls.__name__) is cls:
            name, message, facts = cls.__name__, str(error), error.facts
            break
    else:
        name, message = "RemoteError", f"{type(error).__name__}: {error}"
        facts = {"type_name": type(error).__qualname__, "traceback_text": traceback_text}
    return {"class": name, "message": message, "facts": facts, "traceback": traceback_text}


def error_from_wire(wire: dict[str, Any]) -> CheckpointError:
    """Return the error of `error_to_wire`; unknown classes become `CheckpointError`."""
    cls = _BY_NAME.get(wire["class"], CheckpointError)
    return cls(wire["message"], **wire["facts"])
