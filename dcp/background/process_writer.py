"""The process writer: saves run in a process of their own, which survives the trainer that started it.

One writer process by rank, all of them in a group of their own. A save is sent as soon as its state is
staged: from then on it does not need the trainer. After each save the trainers agree, in a thread of their
own, how it ended on all ranks, and start all writers anew if one was lost.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp.background.link import Child
from dcp.background.rendezvous import meet, own_client
from dcp.background.transfer import Ending, SavingChild, Verdict, error_to_data, verdict
from dcp.progress import Progress
from dcp.ranks.channel import Channel
from dcp.ranks.collectives import Ranks
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
    from dcp.background.writers import Payload, SaveFuture

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0  # that an idle writer may take to end


@dataclass(eq=False)
class _SentSave:
    order: Save
    payload: Payload
    future: SaveFuture
    child: SavingChild | None = None
    released: bool = False
    ending: Ending | None = None
    outcome: SaveOutcome | None = None
    metadata: bytes | None = None

    def has_ended(self) -> bool:
        """Tell whether its writer has said so, or is gone."""
        return self.ending is not None or (self.child is not None and bool(self.child.end))

    def abort(self) -> None:
        """Have its writer call it off, where it has got it."""
        if self.child is not None:  # else `_send_staged` does so
            self.child.send({"kind": "abort", "serial": self.order.serial})


class ProcessWriter:
    """Carries out saves in one writer process by rank; the interface is that of `ThreadWriter`.

    ``channel`` is the ranks' (None for one rank alone); only its store is used, as a client of its own.
    ``start`` starts the process now instead of at the first save.

    When the process of a rank dies, the save under way, or the next, fails with WriterProcessError on all
    ranks, and all get new writers. When trainers die, the writers finish what they were given.
    """

    def __init__(self, channel: Channel | None, *, timeout_seconds: float, start: bool = False) -> None:
        self._rank = 0 if channel is None else channel.rank
        self._world_size = 1 if channel is None else channel.world_size
        self._store = None if channel is None else PrefixStore("writers", own_client(channel.store))
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._sending = threading.RLock()
        self._saves: deque[_SentSave] = deque()
        self._child: SavingChild | None = None
        self._generation = 0
        self._agreement: Channel | None = None
        self._lost = False
        self._closing = False
        self._thread: threading.Thread | None = None
        if start:
            self._start()

    # -- called by the trainer -------------------------------------------------------------------------------

    def submit(self, order: Save, payload: Payload, future: SaveFuture) -> None:
        """Send the save if its state is staged already, else as soon as it is."""
        save = _SentSave(order, payload, future)
        future.on_abort = self._abort
        with self._changed:
            if self._closing:
                raise CheckpointError("this writer is closed")
            self._start()
            self._saves.append(save)
            self._changed.notify_all()
        payload.done.add_done_callback(lambda _: self._send_staged())

    def close(self, timeout_seconds: float) -> None:
        """Finish the saves that were submitted, then end the process; kill it when the time is over."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        thread, child = self._thread, self._child
        if thread is None or not thread.is_alive() or child is None:
            return
        if thread is threading.current_thread():  # which drops the session after its last save, and ends now
            return
        thread.join(timeout_seconds)
        if thread.is_alive():
            (self._child or child).kill(
                f"had not finished {timeout_seconds:g} s after it was asked to, and was killed"
            )
            thread.join(_CLOSE_SECONDS)
        self._give_up_the_rest()

    def _start(self) -> None:
        if self._thread is None:
            self._start_child()
            self._thread = threading.Thread(target=self._run, name="dcp-writer-saves", daemon=True)
            self._thread.start()

    def _start_child(self) -> None:
        arguments = (self._rank, self._world_size, self._timeout_seconds)
        self._child = SavingChild(arguments, self._on_message, self._notify)

    def _abort(self) -> None:
        for save in list(self._saves):
            if save.future.abort_event.is_set():
                save.abort()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- sending ---------------------------------------------------------------------------------------------

    def _send_staged(self) -> None:
        """Send what is staged and was not sent to the present child, in order."""
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

    def _on_message(self, child: Child, body: dict[str, Any]) -> None:
        serial = body["serial"]
        with self._changed:
            save = next((s for s in self._saves if s.order.serial == serial and s.child is child), None)
        if save is None:
            return
        if body["kind"] == "progress":
            if callable(progress := save.order.options.progress):
                progress(Progress(**body["progress"]))
            return
        with self._changed:
            if body["ok"]:
                save.outcome, save.metadata = SaveOutcome(**body["outcome"]), body["metadata"]
                save.ending = Ending(saved=True, save_id=save.outcome.save_id)
            else:
                save.ending = Ending(error=body["error"], broken=body["broken"])
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
                self._finish(save, self._verdict(save, self._ending_of(save)))
                del save  # it holds the staged copies of foreign stagers
        finally:
            with self._changed:
                self._closing = True
            self._give_up_the_rest()
            if self._child is not None:
                self._child.close(_CLOSE_SECONDS)

    def _meet(self) -> None:
        """Give the child the address at which the writers of all ranks meet."""
        child = self._child
        if self._store is None or child is None:
            return
        deadline = time.monotonic() + self._timeout_seconds
        try:
            address, listener = meet(
                PrefixStore(f"meeting/{self._generation}", self._store),
                self._rank,
                self._world_size,
                timeout_seconds=self._timeout_seconds,
                check=self._check_meeting,
            )
            child.send({"kind": "join", "address": address}, [listener.fileno()] if listener else [])
            if listener is not None:
                listener.close()
            if self._agreement is None:
                self._agreement = Channel.own_gloo(
                    PrefixStore("agreement", self._store),
                    self._rank,
                    self._world_size,
                    timeout_seconds=max(1.0, deadline - time.monotonic()),
                )
        except (RuntimeError, OSError, CollectiveTimeoutError) as error:
            child.kill(f"was stopped, because the ranks could not agree on where their writers meet: {error}")

    def _check_meeting(self) -> None:
        if self._closing and not self._saves:
            raise CollectiveTimeoutError("the session was closed before they had met")

    def _ending_of(self, save: _SentSave) -> Ending:
        """Wait for the end of the save here: by its writer's word or end, or because another rank gave it up.

        Its writer may continue for a while then, because its own waits for a lost rank end soon.
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
                    return Ending(died="was given nothing: the state was not staged in time")
            if given_up_at == 0.0 and self._others_gave_up(save):
                given_up_at = time.monotonic()
                save.abort()
            if given_up_at and time.monotonic() - given_up_at > grace_seconds and save.child is not None:
                save.child.kill("did not react when other ranks had given the save up, and was killed")

    def _gave_up_key(self, save: _SentSave) -> str:
        return f"gave_up/{self._generation}/{save.order.serial}"

    def _others_gave_up(self, save: _SentSave) -> bool:
        if self._store is None or self._lost:
            return False
        try:
            return bool(self._store.check([self._gave_up_key(save)]))
        except RuntimeError:  # its host is gone; the writers have a store of their own
            return False

    def _verdict(self, save: _SentSave, ending: Ending) -> Verdict:
        """Agree with all ranks; where that is not possible any more, judge by what this rank knows."""
        together = save.order.options.use_collectives
        if self._store is None or self._lost or self._agreement is None:
            return verdict({self._rank: ending}, self._rank, together=together)
        bound = save.order.options.timeout_seconds
        if ending.is_timeout:  # most of the time is over, and no rank comes after it
            bound = agreeing_seconds(bound)
        try:
            if not ending.saved:
                self._store.set(self._gave_up_key(save), "1")
            ranks = Ranks(use_dist=True, channel=self._agreement, timeout_seconds=bound, operation="writers")
            parts = ranks.all_gather("agree on how the save ended", ending.encode)
        except (RuntimeError, CheckpointError) as error:
            self._lost = True
            logger.error("the trainers cannot agree on how a save ended: %s", error)
            if not ending.committed and not ending.died:
                ending = Ending(error=error_to_data(error))
            return verdict({self._rank: ending}, self._rank, together=together)
        endings = {rank: Ending.decode(part) for rank, part in enumerate(parts)}
        return verdict(endings, self._rank, together=together)

    def _finish(self, save: _SentSave, found: Verdict) -> None:
        restart = found.restart and not self._lost and not self._closing
        for note in found.notes:
            logger.warning("%s", note)
        is_given_up = False  # by a close whose time was over; its future has ended
        try:
            with self._sending:
                with self._changed:
                    is_given_up = save not in self._saves
                    if not is_given_up:
                        self._saves.popleft()
                save.payload.release()
                if is_given_up:
                    return
                if found.error is not None and self._child is not None:
                    self._child.forget()
                if restart:
                    self._replace_child()
                elif self._saves and (following := self._saves[0]).child and not following.released:
                    following.released = True
                    following.child.send({"kind": "go", "serial": following.order.serial})
        finally:  # whatever fails here is not of this save, which nothing else will end
            if not is_given_up:
                _end(save, found, self._rank)
        if restart:
            self._meet()

    def _replace_child(self) -> None:
        if self._child is not None:
            self._child.kill("was stopped because the writer of another rank was lost")
            self._child.close(_CLOSE_SECONDS)
        self._generation += 1
        with self._changed:
            self._start_child()
        self._send_staged()

    def _give_up_the_rest(self) -> None:
        """End the futures after a close that was not answered in time, so that no wait for them lasts for
        ever."""
        with self._changed:
            left, self._saves = list(self._saves), deque()
        for save in left:
            if not save.future.done():
                save.future.set_exception(
                    WriterProcessError("the writer was closed before this save had ended; look at the id")
                )


def _end(save: _SentSave, found: Verdict, rank: int) -> None:
    """End the future as all ranks found."""
    save.future.on_abort = None
    if found.error is not None:
        save.future.set_exception(found.error)
        return
    try:
        metadata = _metadata(save, found.save_id, rank)
    except Exception as unknown:  # noqa: BLE001 - whatever it is, a caller waits for the future
        error = WriterProcessError(
            "the checkpoint is committed, but its metadata cannot be given: "
            f"{type(unknown).__name__}: {unknown}",
            committed=True,
            rank=rank,
        )
        error.__cause__ = unknown
        save.future.set_exception(error)
    else:
        save.future.outcome = save.outcome or SaveOutcome(found.save_id)
        save.future.set_result(metadata)


def _metadata(save: _SentSave, save_id: str, rank: int) -> Metadata:
    writer = save.order.storage
    if writer is None:
        if save.metadata is None:
            raise WriterProcessError(
                f"the writer process of rank {rank} died before it said what it is; read it from the storage"
            )
        sent: Metadata = pickle.loads(save.metadata)
        return sent
    store = writer.open_store(writer.path)
    own_rank = None if save.order.options.use_collectives else rank

    def index() -> CheckpointIndex:
        found = open_index(store, rank=own_rank)
        if found.provenance.get("save_id", save_id) != save_id:
            raise CheckpointConflictError(
                f"{store.url} holds another checkpoint than the one whose metadata is asked for: it was "
                "replaced since; look at metadata before the next save to the same id",
                path=store.url,
            )
        return found

    return LazyMetadata.of(index, StorageMeta(checkpoint_id=writer.path, save_id=save_id))
