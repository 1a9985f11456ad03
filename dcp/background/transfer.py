"""Transfer saves to the writer process: options and the places of the staged state.

Saves are pickled, with three differences: staged tensors stay in shared memory; a DTensor is sent as its
local tensor and a description of its mesh; objects that the writer cannot import are refused in the trainer.
Mappings of arenas and the form of the state (views, columns) are sent once.
"""

from __future__ import annotations

import errno
import io
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp.background.link import Connection, watch_process
from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.layout.local_tensor import ShardClaim, claim_of, with_claim
from dcp.planners.rank_state import RankState
from dcp.ranks.failures import RankFailedError, pack_failure
from dcp.saving.save import Save
from dcp.storage import torch_compat
from dcp.storage.errors import CheckpointError, WriterProcessError
from dcp.storage.tensors import LocalMemory, is_whole_memory, torch_dtype
from dcp.storage.torch_storage.writer import FileSystemWriter
from dcp.version import __version__

if TYPE_CHECKING:
    from dcp.staging.arena import HostArena
    from dcp.staging.stager import StagedState

logger = logging.getLogger(__name__)

_REAP_SECONDS = 5.0

_ENDED = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""Errors of sending to an ended process."""

_DROPPED = ("TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that would connect the writers' group to the launcher of the trainers."""

_SET = {
    # leave the cores to the training
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # staged copies are in host memory, so the process must not create a device context
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}

_WAY_OUT = (
    "Define its classes and functions at the top level of a module that the writer process can import, or "
    "save in a thread of the trainer (AsyncCheckpointerType.THREAD)"
)

_UNPICKLABLE = (
    CheckpointError,
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    RecursionError,
    RuntimeError,
)
"""Errors of pickle and of objects' own pickling methods."""


# -- any value -----------------------------------------------------------------------------------------------


def pack(value: Any, what: str, arena: HostArena | None = None) -> bytes:
    """Encode ``value`` for `unpack` in the writer process; ``what`` names it in errors. Tensors in ``arena``
    are encoded by place.

    Raises WriterProcessError for objects that cannot be pickled or imported there.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, arena).dump(value)
    except _UNPICKLABLE as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise WriterProcessError(
            f"{what} cannot be sent to the writer process: {reason.rstrip('.')}. {_WAY_OUT}."
        ) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arena: HostArena | None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._begin = arena.address if arena is not None else 0
        self._size_bytes = arena.size_bytes if arena is not None else 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch_compat.ShardedTensor):
            return torch_compat.sharded_of_parts, torch_compat.sharded_parts(obj)
        if isinstance(obj, DTensor):
            return torch_compat.dtensor_of_parts, torch_compat.dtensor_parts(obj)
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, DeviceMesh):
            return torch_compat.mesh_of_parts, torch_compat.mesh_parts(obj)
        if isinstance(obj, FileSystemWriter):  # omit the state of the last save
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
                state = dict(reduced[2], _store=None, _previous=None, index=None, state_dict_cache=None)
                return (*reduced[:2], state, *reduced[3:])
            return reduced
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            raise CheckpointError(
                f"{obj.__qualname__} is defined in the main script (__main__), which the writer process does "
                "not run"
            )
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_cpu:
            raise CheckpointError(f"a tensor on {tensor.device} is not a staged copy")
        if tensor.layout is torch.strided and is_whole_memory(tensor) and not tensor.is_quantized:
            offset = tensor.data_ptr() - self._begin
            if 0 <= offset < self._size_bytes:
                parts = offset, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
                return _tensor, (*parts, claim_of(tensor))
        return NotImplemented  # pickle as torch does, with the bytes in the pickle


_memory: ContextVar[torch.Tensor] = ContextVar("memory of the state that is being unpacked")


def unpack(data: bytes, memory: torch.Tensor | None = None) -> Any:
    """Decode a value of `pack`; ``memory`` has the bytes of the arena.

    Raises WriterProcessError for objects that cannot be imported or built.
    """
    token = _memory.set(torch.empty(0, dtype=torch.uint8, device="cpu") if memory is None else memory)
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WriterProcessError(
            f"the writer process cannot rebuild the save: {type(error).__name__}: {error}. {_WAY_OUT}."
        ) from error
    finally:
        _memory.reset(token)


def map_memory(fd: int, size_bytes: int) -> torch.Tensor:
    """Map a memory file; the mapping lasts as long as views of the tensor."""
    return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)


def tensor_view(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """View the contiguous tensor at byte ``offset`` of ``memory``."""
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return memory[offset : offset + size].view(dtype).view(shape)


def _tensor(
    offset: int, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, claim: ShardClaim | None
) -> torch.Tensor:
    tensor = tensor_view(_memory.get(), offset, shape, dtype).requires_grad_(requires_grad)
    return with_claim(tensor, claim)


# -- in the trainer ------------------------------------------------------------------------------------------


@dataclass
class _Sent:
    """Number of an arena's mapping in the writer process, and the parts of its state already sent."""

    key: int
    generation: int
    layout: int = 0
    columns: tuple[object, ...] = ()


class WriterProcess:
    """A writer process, seen from its trainer. The constructor starts it and never raises.

    ``arguments`` are rank, world size and timeout in seconds. ``on_message`` receives messages in a thread of
    this object. ``end`` describes the end of the process, "" before; then ``changed`` is notified.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        on_message: Callable[[WriterProcess, dict[str, Any]], None],
        changed: threading.Condition,
    ) -> None:
        self.end = ""
        self._on_message, self._changed = on_message, changed
        self._killed_because = ""
        self._arenas: weakref.WeakKeyDictionary[HostArena, _Sent] = weakref.WeakKeyDictionary()
        self._last_key = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = _start(theirs.fileno(), arguments)
            except OSError as error:
                ours.close()
                self._note_end(f"could not start: {error}")
                return
        self._connection = Connection(ours, watch_process(self._process.pid))
        threading.Thread(target=self._receive, name="dcp-writer-watch", daemon=True).start()

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message; failures show in ``end``."""
        if self.end:
            return
        try:
            self._connection.send(body, fds)
        except BlockingIOError:
            self.kill("stopped receiving messages and was killed")
        except OSError as error:
            if error.errno not in _ENDED:  # otherwise the writer would wait for the save forever
                self.kill(f"could not receive a message and was killed: {error}")

    def kill(self, because: str) -> None:
        """Send SIGKILL and set ``end`` to ``because``."""
        if not self.end:
            self._killed_because = because
            self._process.kill()

    def close(self, timeout_seconds: float) -> None:
        """Ask the process to end, and kill it after the timeout."""
        self.send({"kind": "close"})
        with self._changed:
            if not self._changed.wait_for(lambda: self.end, timeout_seconds):
                self.kill("did not end on request and was killed")
                self._changed.wait_for(lambda: self.end, _REAP_SECONDS)

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                body, fds = message
                for fd in fds:
                    os.close(fd)
                self._on_message(self, body)
        except Exception as error:
            logger.exception("a message of writer process %d", self._process.pid)
            self.kill(f"sent an invalid message and was killed: {type(error).__name__}: {error}")
        try:
            status = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # the connection is closed, so no save can be lost
            self._process.kill()
            status = self._process.wait()
        self._connection.close()  # close before notifying waiting threads
        self._note_end(self._killed_because or _end_of(status))

    def _note_end(self, end: str) -> None:
        with self._changed:
            self.end = end
            self._changed.notify_all()

    # -- saves -----------------------------------------------------------------------------------------------

    def send_save(self, order: Save, payload: StagedState, *, go: bool, place: str) -> None:
        """Send a save with a completed ``payload``. With ``go``, the save may begin after the previous ones.

        A save that cannot be sent is sent as a failure for the other ranks.
        """
        options, progress = order.options, order.options.progress
        plain = ("use_collectives", "timeout_seconds", "retries", "retry_pause_seconds")
        refused: dict[str, Any] = {
            "kind": "save",
            "serial": order.serial,
            "go": go,
            "place": place,
            "on_columns": order.on_columns,
            "options": {name: getattr(options, name) for name in plain},
            "progress": "report" if callable(progress) else bool(progress),
        }
        fds: list[int] = []
        try:
            body = refused | {"cwd": os.getcwd()}  # noqa: PTH109 - travels as text
            seconds = order.seconds | payload.seconds
            sent = replace(order, seconds=seconds, options=replace(options, progress=None))
            body["order"] = pack(sent, "the save's storage, planner or features")
            fds = [self._add_part(payload, body)]
            self.send(body, [*fds, body.pop("mapping_fd")] if "mapping_fd" in body else fds)
        except Exception as error:  # noqa: BLE001 - raised by the save, on all ranks
            self.forget()
            self.send(refused | {"refused": pack_failure(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def forget(self) -> None:
        """Send everything again with the next save, after a failed one."""
        self._arenas.clear()

    def _add_part(self, payload: StagedState, body: dict[str, Any]) -> int:
        """Add new mappings and forms to ``body``; return a memory file with the rest, which may exceed 4
        GiB.
        """
        part = payload.done.result()
        arena, layout = payload.arena, payload.layout
        if arena is None or layout is None or arena.fd is None:
            raise CheckpointError("the state was staged in private memory, which the writer cannot map")
        known = self._arenas.get(arena)
        if known is None or known.generation != arena.generation:
            self._last_key += 1
            known = self._arenas[arena] = _Sent(self._last_key, arena.generation)
            body |= {"mapping": arena.size_bytes, "mapping_fd": arena.fd}
        body["arena"] = known.key
        # the process must drop the mapping to free the memory
        body["keep"] = [
            sent.key
            for each, sent in self._arenas.items()
            if not each.closed and each.generation == sent.generation
        ]
        if not isinstance(part, RankState):
            packed = pack(part, "the state dict", arena)
            return _memory_file(lambda file: file.write(packed))
        columns = (part.columns, part.replicated)
        # comparing 20,000 rows takes 1 ms of the training's time, pickling them 7 ms
        if known.layout != layout.number or not all(map(_same, columns, known.columns)):
            views = part.memory
            shapes = views.dtype_codes, views.shape_start, views.shape_values
            form = (layout.offsets, *shapes, *columns)
            body["form"] = pickle.dumps(form, pickle.HIGHEST_PROTOCOL)
            known.layout, known.columns = layout.number, columns
        objects = list(part.objects)
        return _memory_file(lambda file: pickle.dump(objects, file, pickle.HIGHEST_PROTOCOL))


def _start(fd: int, arguments: Sequence[object]) -> subprocess.Popen[bytes]:
    """Start the process with the trainer's environment and module search path, without variables of its
    launcher.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]  # noqa: PTH100 - "" is cwd
    # -P: the working directory must not provide modules
    command = [sys.executable or "", "-P", "-m", "dcp.background.main"]
    return subprocess.Popen(
        [*command, *map(str, (fd, os.getpid(), __version__, *arguments))],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,  # protects from Ctrl-C and from the launcher's signals
        env=kept | _SET | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
    )


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status} (see its messages on stderr)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


def _memory_file(fill: Callable[[BinaryIO], object]) -> int:
    """Return the descriptor of a memory file filled by ``fill``; the caller closes it."""
    memory = os.memfd_create("dcp-values", os.MFD_CLOEXEC)
    try:
        with os.fdopen(memory, "wb", closefd=False) as file:
            fill(file)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _same(mine: object, others: object) -> bool:
    """Return whether columns are equal by value."""
    if mine is others:
        return True
    if type(mine) is not type(others):
        return False
    if isinstance(mine, np.ndarray) and isinstance(others, np.ndarray):
        return np.array_equal(mine, others)
    if isinstance(mine, (SaveColumns, SaveObjects)):
        return all(_same(getattr(mine, item.name), getattr(others, item.name)) for item in fields(mine))
    return bool(mine == others)


# -- in the writer process -----------------------------------------------------------------------------------


class TrainerMemory:
    """Arenas of the trainer in this process, with the staged form of the state: tensors, columns, replicated
    rows.
    """

    def __init__(self) -> None:
        self._arenas: dict[int, torch.Tensor] = {}
        self._forms: dict[int, tuple[LocalMemory, SaveColumns, np.ndarray[Any, np.dtype[np.uint8]]]] = {}

    def payload(self, body: dict[str, Any], fds: list[int]) -> Callable[[], RankState | dict[str, Any]]:
        """Map the arenas and forms of a save; return a function that gives its staged state.

        After a failure nothing is kept, so that saves cannot mix.
        """
        try:
            for known in self._arenas.keys() - body.get("keep", self._arenas.keys()):
                del self._arenas[known]
                self._forms.pop(known, None)
            if "mapping" in body:
                self._arenas[body["arena"]] = map_memory(fds[1], body["mapping"])
            if "form" in body:
                self._forms[body["arena"]] = _form(self._arenas[body["arena"]], body["form"])
        except BaseException:
            self._arenas.clear()
            self._forms.clear()
            raise
        return partial(self._state, body, fds)

    def _state(self, body: dict[str, Any], fds: list[int]) -> RankState | dict[str, Any]:
        arena, form = self._arenas.get(body["arena"]), self._forms.get(body["arena"])
        with os.fdopen(fds[0], "rb", closefd=False) as file:
            file.seek(0)
            if arena is not None and not body["on_columns"]:
                state: dict[str, Any] = unpack(file.read(), arena)
                return state
            if form is not None:
                sources, columns, replicated = form
                return RankState(columns, sources, pickle.load(file), replicated)
        raise WriterProcessError(
            "the writer lost the state of the previous save, which this save reuses; the next save sends it "
            "again"
        )


def _form(arena: torch.Tensor, data: bytes) -> tuple[LocalMemory, SaveColumns, Any]:
    """Return views of ``arena`` for the tensors of a layout, with their columns and further facts."""
    offsets, dtype_codes, shape_start, shape_values, columns, replicated = pickle.loads(data)
    extents = shape_values.tolist()
    shapes = [tuple(extents[begin:end]) for begin, end in pairwise(shape_start.tolist())]
    views = [
        tensor_view(arena, offset, shape, torch_dtype(code))
        for offset, shape, code in zip(offsets.tolist(), shapes, dtype_codes.tolist(), strict=True)
    ]
    return LocalMemory.of(views), columns, replicated


def error_to_data(error: BaseException) -> dict[str, Any]:
    """Describe ``error`` in plain data, the failures by rank of a `RankFailedError` included."""
    failures = error.failures if isinstance(error, RankFailedError) else {}
    return {
        "own": pack_failure(error),
        "step": str(getattr(error, "step", "") or "save"),
        "ranks": {rank: pack_failure(cause) for rank, (cause, _) in failures.items()},
    }
