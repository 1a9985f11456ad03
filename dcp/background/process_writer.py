"""Process writer: saves run in a separate process, which survives the trainer.

Each rank has one writer process, and these processes form a separate group. A save is sent when its state is
staged, and from then on does not need the trainer. After each save, the trainers exchange the result in a
thread, and restart all writers if one died.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp.background.link import LOOPBACK
from dcp.background.transfer import WriterProcess, error_to_data
from dcp.background.writers import own_client
from dcp.progress import Progress
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import decode_failure, failure_of
from dcp.saving.save import Save, SaveOutcome, agreeing_seconds
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CollectiveTimeoutError,
    WriterProcessError,
)
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import open_index
from dcp.storage.torch_storage.metadata import LazyMetadata

if TYPE_CHECKING:
    from dcp.background.writers import SaveFuture
    from dcp.staging.stager import StagedState

logger = logging.getLogger(__name__)

HOST_VARIABLE = "DCP_WRITER_HOST"
"""Environment variable on rank 0 with the host name or address for other hosts, if detection fails."""

_CLOSE_SECONDS = 5.0  # for an idle writer to end
_BACKLOG = 4096
_LONGEST_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Ending:
    """End of a save on one rank. ``died`` describes the end of a dead writer process; ``error`` is the
    encoded exception.

    ``broken``: this rank's writer may be in another step than the other writers.
    """

    saved: bool = False
    save_id: str = ""
    died: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    broken: bool = False

    def encode(self) -> bytes:
        """Encode as bytes, for the other ranks."""
        data: bytes = msgpack.packb(asdict(self), unicode_errors="surrogatepass")
        return data

    @classmethod
    def decode(cls, data: bytes) -> Ending:
        """Undo `encode`."""
        return cls(**msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False))

    @property
    def failure(self) -> CheckpointError | None:
        """The error that the writer reported."""
        return decode_failure(self.error["own"]) if self.error else None

    @property
    def committed(self) -> bool:
        """True if the writer reported a commit."""
        return self.saved or (self.failure is not None and self.failure.committed)


def error_from_data(data: dict[str, Any], rank: int) -> BaseException:
    """Decode an exception of rank ``rank``'s writer, encoded by `error_to_data`."""
    own = decode_failure(data["own"])
    if not data["ranks"]:
        return own
    failures = {int(failed): decode_failure(packed) for failed, packed in data["ranks"].items()}
    error = failure_of(data["step"], failures, rank, None)
    if isinstance(error, CheckpointError):
        error.__dict__.update(own.facts)
    return error


def verdict(
    endings: Mapping[int, Ending], rank: int, *, together: bool
) -> tuple[BaseException | None, str, bool]:
    """Combine ``endings`` by rank: the error for ``rank``, the save id, and whether to restart all writers.

    Unknown ranks are omitted. A save made ``together`` is committed if one rank knows of the commit, even if
    other writers died later. An error after the commit, such as of `.metadata`, is raised. A death takes
    precedence over errors that it caused on other ranks.
    """
    restart = any(ending.died or ending.broken for ending in endings.values())
    own = endings[rank]
    known = [ending for ending in (own, *endings.values()) if ending.committed]
    if together and known:
        if all(ending.error and not ending.broken for ending in known):
            return error_from_data(known[0].error, rank), "", restart
        save_id = next((ending.save_id for ending in endings.values() if ending.save_id), "")
        return None, save_id, restart
    deaths = {
        number: WriterProcessError(
            f"Checkpoint background process is dead: the writer process of rank {number} {ending.died}. An "
            "earlier checkpoint with the same id is unchanged, unless the save had just committed. The next "
            "save starts a new writer process",
            rank=number,
        )
        for number, ending in endings.items()
        if ending.died
    }
    if deaths:
        error = failure_of("write in the background", deaths, rank, None)
        if own.error:
            error.__context__ = error_from_data(own.error, rank)
        return error, "", restart
    if own.saved:
        return None, own.save_id, restart
    return error_from_data(own.error, rank), "", restart


@dataclass(eq=False)
class _SentSave:
    order: Save
    payload: StagedState
    future: SaveFuture
    child: WriterProcess | None = None
    released: bool = False
    ending: Ending | None = None
    reply: dict[str, Any] = field(default_factory=dict)

    def has_ended(self) -> bool:
        """Return whether the writer has reported the end or is dead."""
        return self.ending is not None or (self.child is not None and bool(self.child.end))

    def abort(self) -> None:
        """Cancel the save in the writer."""
        if self.child is not None:  # otherwise `_send_staged` sends the abort
            self.child.send({"kind": "abort", "serial": self.order.serial})


class ProcessWriter:
    """Run saves in one writer process for each rank, with the interface of `ThreadWriter`.

    Only the store of ``channel`` is used (None for a single rank). ``start`` starts the process at once
    instead of at the first save. If the process of a rank dies, the current or next save raises
    WriterProcessError on all ranks, and all writers restart. If trainers die, writers finish their saves.
    """

    def __init__(self, channel: Channel | None, *, timeout_seconds: float, start: bool = False) -> None:
        self._rank = 0 if channel is None else channel.rank
        self._world_size = 1 if channel is None else channel.world_size
        self._store = None if channel is None else PrefixStore("writers", own_client(channel.store))
        self._timeout_seconds = timeout_seconds
        self._arguments = (self._rank, self._world_size, timeout_seconds)
        self._changed = threading.Condition()
        self._sending = threading.RLock()
        self._saves: deque[_SentSave] = deque()
        self._child: WriterProcess | None = None
        self._generation = 0
        self._agreement: Channel | None = None
        self._lost = False
        self._closing = False
        self._thread: threading.Thread | None = None
        if start:
            self._start()

    # -- called by the trainer -------------------------------------------------------------------------------

    def submit(self, order: Save, payload: StagedState, future: SaveFuture) -> None:
        """Send the save when its state is staged."""
        save = _SentSave(order, payload, future)
        future.on_abort = save.abort
        with self._changed:
            if self._closing:
                raise CheckpointError("the background writer is closed: open a new session")
            self._start()
            self._saves.append(save)
            self._changed.notify_all()
        payload.done.add_done_callback(lambda _: self._send_staged())

    def close(self, timeout_seconds: float) -> None:
        """Finish submitted saves and end the process; kill it after the timeout."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        thread, child = self._thread, self._child
        # called in the thread itself, which drops the session after its last save
        if thread is None or child is None or not thread.is_alive() or thread is threading.current_thread():
            return
        thread.join(timeout_seconds)
        if thread.is_alive():
            (self._child or child).kill(
                f"did not finish within {timeout_seconds:g} s after the request to end, and was killed"
            )
            thread.join(_CLOSE_SECONDS)
        self._give_up_the_rest()

    def _start(self) -> None:
        if self._thread is None:
            self._child = WriterProcess(self._arguments, self._on_message, self._changed)
            self._thread = threading.Thread(target=self._run, name="dcp-writer-saves", daemon=True)
            self._thread.start()

    # -- sending ---------------------------------------------------------------------------------------------

    def _send_staged(self) -> None:
        """Send the staged saves that the present child lacks, in order."""
        with self._sending:
            for position, save in enumerate(list(self._saves)):
                if save.child is self._child:
                    continue
                if not save.payload.done.done() or self._child is None:
                    return
                save.child, save.released = self._child, position == 0
                place = save.future.checkpoint_id
                self._child.send_save(save.order, save.payload, go=save.released, place=place)
                if save.future.abort_event.is_set():
                    save.abort()

    # -- receiving (in the child's thread) -------------------------------------------------------------------

    def _on_message(self, child: WriterProcess, body: dict[str, Any]) -> None:
        serial = body["serial"]
        with self._changed:
            save = next((s for s in self._saves if s.order.serial == serial and s.child is child), None)
        if save is None:
            return
        if body["kind"] == "progress":
            if callable(progress := save.order.options.progress):
                progress(Progress(**body["progress"]))
            return
        ending = Ending(**body["ending"])  # decode here: an invalid message ends the process
        if ending.error:
            error_from_data(ending.error, self._rank)
        with self._changed:
            save.ending, save.reply = ending, body
            self._changed.notify_all()

    # -- one save after the other (in the thread of this object) ---------------------------------------------

    def _run(self) -> None:
        try:
            self._meet()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._saves or self._closing)
                    if not self._saves:
                        return
                    save = self._saves[0]
                self._finish(save, self._agreed(save, self._ending_of(save)))
                del save  # releases staged copies of custom stagers
        finally:
            with self._changed:
                self._closing = True
            self._give_up_the_rest()
            if self._child is not None:
                self._child.close(_CLOSE_SECONDS)

    def _meet(self) -> None:
        """Send the child the address at which the writers of all ranks connect."""
        child = self._child
        if self._store is None or child is None:
            return
        deadline = time.monotonic() + self._timeout_seconds
        meeting: Any = PrefixStore(f"meeting/{self._generation}", self._store)
        try:
            # equal on two ranks of one network namespace, which can connect by the loopback interface
            boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
            net = os.stat("/proc/self/ns/net")  # noqa: PTH116 - what the link points to is no path
            meeting.set(f"host/{self._rank}", b"%s/%d/%d" % (boot, net.st_dev, net.st_ino))
            if self._rank == 0:
                ranks = range(self._world_size)
                hosts = {self._read(meeting, f"host/{rank}", rank, deadline) for rank in ranks}
                host, listener = _listen(is_one_host=len(hosts) == 1)
                with listener:
                    address = [host, listener.getsockname()[1]]
                    meeting.set("address", msgpack.packb(address))
                    child.send({"kind": "join", "address": address}, [listener.fileno()])
            else:
                address = msgpack.unpackb(self._read(meeting, "address", 0, deadline))
                child.send({"kind": "join", "address": address})
            if self._agreement is None:
                self._agreement = Channel.own_gloo(
                    PrefixStore("agreement", self._store),
                    self._rank,
                    self._world_size,
                    timeout_seconds=max(1.0, deadline - time.monotonic()),
                )
        except (RuntimeError, OSError, CollectiveTimeoutError) as error:
            child.kill(f"was killed, because the ranks could not exchange the addresses of writers: {error}")

    def _read(self, store: Any, key: str, rank: int, deadline: float) -> bytes:
        """Wait for the value of ``key``, set by ``rank``, by polling.

        A blocking wait would hold the client's lock, which other threads need.
        """
        pause = 0.001
        while not store.check([key]):
            if self._closing and not self._saves:
                raise CollectiveTimeoutError("the session was closed while writer processes were connecting")
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"rank {rank} has not started its writer process in time: the rank died, or did not call "
                    "the save. All ranks of the process group must call the save.",
                    ranks=[rank],
                )
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.5)
        value: bytes = store.get(key)
        return value

    def _ending_of(self, save: _SentSave) -> Ending:
        """Wait for the end of a save on this rank: a report, the writer's death, or an abort by another rank.

        After an abort the writer may continue until its own timeout.
        """
        agreeing = agreeing_seconds(save.order.options.timeout_seconds)
        look_seconds, grace_seconds = min(0.5, agreeing / 10), agreeing / 4
        wait([save.payload.done], save.order.options.timeout_seconds)
        given_up_at = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(save.has_ended, look_seconds)
                if save.ending is not None:
                    return save.ending
                if save.child is not None and save.child.end:
                    return Ending(died=save.child.end)
                if not save.payload.done.done():
                    return Ending(died="received no state: staging did not end in time")
            if given_up_at == 0.0 and self._others_gave_up(save):
                given_up_at = time.monotonic()
                save.abort()
            if given_up_at and time.monotonic() - given_up_at > grace_seconds and save.child is not None:
                save.child.kill("did not respond after other ranks aborted the save, and was killed")

    def _gave_up_key(self, save: _SentSave) -> str:
        return f"gave_up/{self._generation}/{save.order.serial}"

    def _others_gave_up(self, save: _SentSave) -> bool:
        if self._store is None or self._lost:
            return False
        try:
            return bool(self._store.check([self._gave_up_key(save)]))
        except RuntimeError:  # the host is gone; writers have their own store
            return False

    def _agreed(self, save: _SentSave, ending: Ending) -> dict[int, Ending]:
        """Return the endings of all ranks; only this rank's if agreement fails."""
        if self._store is None or self._lost or self._agreement is None:
            return {self._rank: ending}
        bound = save.order.options.timeout_seconds
        if isinstance(ending.failure, CollectiveTimeoutError):  # all ranks have already waited for a timeout
            bound = agreeing_seconds(bound)
        try:
            if not ending.saved:
                self._store.set(self._gave_up_key(save), "1")
            ranks = Ranks(use_dist=True, channel=self._agreement, timeout_seconds=bound, operation="writers")
            parts = ranks.all_gather("agree on how the save ended", ending.encode)
        except (RuntimeError, CheckpointError) as error:
            self._lost = True
            logger.error("the ranks cannot exchange the result of a save: %s", error)
            if not ending.committed and not ending.died:
                ending = Ending(error=error_to_data(error))
            return {self._rank: ending}
        return {rank: Ending.decode(part) for rank, part in enumerate(parts)}

    def _finish(self, save: _SentSave, endings: Mapping[int, Ending]) -> None:
        for rank, ending in endings.items():
            if ending.died:
                logger.warning("the writer process of rank %d %s", rank, ending.died)
        together = save.order.options.use_collectives
        error, save_id, restart = verdict(endings, self._rank, together=together)
        restart = restart and not self._lost and not self._closing
        is_given_up = False  # True after a close that timed out and ended the future
        try:
            with self._sending:
                with self._changed:
                    is_given_up = save not in self._saves
                    if not is_given_up:
                        self._saves.popleft()
                save.payload.release()
                if is_given_up:
                    return
                if error is not None and self._child is not None:
                    self._child.forget()
                if restart:
                    self._replace_child()
                elif self._saves and (following := self._saves[0]).child and not following.released:
                    following.released = True
                    following.child.send({"kind": "go", "serial": following.order.serial})
        finally:  # an error here must not leave the future unfinished
            if not is_given_up:
                _end(save, error, save_id, self._rank)
        if restart:
            self._meet()

    def _replace_child(self) -> None:
        if self._child is not None:
            self._child.kill("was killed, because the writer process of another rank died")
            self._child.close(_CLOSE_SECONDS)
        self._generation += 1
        with self._changed:
            self._child = WriterProcess(self._arguments, self._on_message, self._changed)
        self._send_staged()

    def _give_up_the_rest(self) -> None:
        """End the remaining futures after a close that timed out."""
        with self._changed:
            left, self._saves = list(self._saves), deque()
        for save in left:
            save.future.on_abort = None
            if not save.future.done():
                save.future.set_exception(
                    WriterProcessError(
                        "the writer was closed before this save ended; check with dcp ls whether the save "
                        "was committed"
                    )
                )


def _end(save: _SentSave, error: BaseException | None, save_id: str, rank: int) -> None:
    """End the future with the result agreed by all ranks."""
    save.future.on_abort = None
    if error is not None:
        save.future.set_exception(error)
        return
    try:
        metadata = _metadata(save, save_id, rank)
    except Exception as unknown:  # noqa: BLE001 - whatever it is, a caller waits for the future
        error = WriterProcessError(
            "the checkpoint is committed, but its metadata cannot be returned: "
            f"{type(unknown).__name__}: {unknown}",
            committed=True,
            rank=rank,
        )
        error.__cause__ = unknown
        save.future.set_exception(error)
    else:
        save.future.outcome = SaveOutcome(**save.reply.get("outcome", {"save_id": save_id}))
        save.future.set_result(metadata)


def _metadata(save: _SentSave, save_id: str, rank: int) -> Metadata:
    writer = save.order.storage
    if writer is None:
        if save.reply.get("metadata") is None:
            raise WriterProcessError(
                f"the writer process of rank {rank} died before it sent the metadata; read the checkpoint's "
                "metadata from the storage"
            )
        sent: Metadata = pickle.loads(save.reply["metadata"])
        return sent
    store = writer.open_store(writer.path)
    own_rank = None if save.order.options.use_collectives else rank

    def index() -> CheckpointIndex:
        found = open_index(store, rank=own_rank)
        if found.provenance.get("save_id", save_id) != save_id:
            raise CheckpointConflictError(
                f"{store.url}: a later save replaced the checkpoint, so its metadata is lost; read the "
                "metadata before the next save to the same id",
                path=store.url,
            )
        return found

    return LazyMetadata.of(index, StorageMeta(checkpoint_id=writer.path, save_id=save_id))


def _listen(*, is_one_host: bool) -> tuple[str, socket.socket]:
    """Listen on rank 0; return the name for other ranks and the socket."""
    if is_one_host:
        return LOOPBACK, socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
    host = os.environ.get(HOST_VARIABLE)
    # MASTER_ADDR is the host of global rank 0, which may differ from rank 0 of this group
    if not host and dist.is_initialized() and dist.get_rank() == 0:
        host = os.environ.get("MASTER_ADDR")
    host = host or socket.getfqdn()
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return host, socket.create_server(("::", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=True)
    return host, socket.create_server(("", 0), backlog=_BACKLOG)
