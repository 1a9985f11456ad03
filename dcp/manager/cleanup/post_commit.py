"""What follows a commit, behind the training loop: verification, its note, retention, deletions.

On the coordinator only: one process of a run deletes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from dcp.inspection.verification import verify_store
from dcp.manager.cleanup import retention
from dcp.manager.cleanup.deletion import Deleter, DeleterClosedError, DeletionEvent
from dcp.manager.cleanup.dropping import drop_parts, finish_drop
from dcp.manager.cleanup.other_runs import OtherRuns
from dcp.manager.cleanup.retention import Part, Retention
from dcp.manager.events import Events
from dcp.steps.folders import Commit, StepFolders, read_commit
from dcp.steps.notes import Verified
from dcp.storage.commit_names import METADATA_NAME
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.formats.index import UNKNOWN
from dcp.storage.stores.base import Store

__all__ = ["Check", "PostCommitWorker", "problem_of"]

logger = logging.getLogger(__name__)

Check = Literal["sizes", "full", "off"]
"""How a committed checkpoint is verified: its files are there with the committed sizes; all of its bytes
match their checksums; not at all."""

_MAX_NOTED_CHARACTERS = 1000
_DROP_SECONDS = 60.0


def problem_of(store: Store, commit: Commit, check: Check) -> str | None:
    """What is wrong with what is committed in ``store``; None if ``check`` finds nothing."""
    index = commit.index
    if index is None:
        return str(commit.problem)
    if check == "full":
        found = verify_store(store).faults
        for fault in found:
            if fault.file == METADATA_NAME:  # stock torch's alone: dcp loads, and retention counts it
                logger.warning("%s: %s", store.url, fault.message)
        return "; ".join([one.message for one in found if one.file != METADATA_NAME][:8]) or None
    sizes = {info.name: info.size_bytes for info in store.list()}
    wrong = []
    for name, size in zip(index.files, index.file_sizes.tolist(), strict=True):
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif size not in (UNKNOWN, sizes[name]):
            wrong.append(f"{name} has {sizes[name]} bytes, committed were {size}")
    return "; ".join(wrong[:8]) or None


def _is_replaced(store: Store, commit: Commit) -> bool:
    """Whether another save has committed over ``commit``, or a part of it was dropped."""
    present = read_commit(store)
    return present is not None and present.versions != commit.versions


class PostCommitWorker:
    """Looks after the checkpoints below ``folders``, in a daemon thread that the first commit starts.

    ``on_damage`` is called from that thread with what is wrong with a checkpoint that has just been
    committed.
    """

    def __init__(
        self,
        folders: StepFolders,
        keep: Retention | None,
        check: Check,
        events: Events,
        *,
        on_damage: Callable[[CorruptCheckpointError], None],
    ) -> None:
        self._folders = folders
        self._keep = keep
        self._check = check
        self._events = events
        self._on_damage = on_damage
        self._others = OtherRuns(folders)
        self._deleter = Deleter(folders, on_event=self._on_deletion)
        self._changed = threading.Condition()
        self._committed: list[int] = []
        self._doubted: list[tuple[int, str]] = []
        self._busy = False
        self._resumed = False
        self._begun = False
        self._half_deleted: set[int] = set()
        """Steps whose deletion has failed for good."""
        self._synced = ""
        """The newest save that was made durable here."""
        self._warned: set[str] = set()
        """Metrics of rules that could not be judged."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._unsettled: Counter[int] = Counter()
        """Steps being saved or verified: retention must neither count nor delete them."""
        self._dropping: int | None = None
        """The step of which something is being dropped: a save of it waits that long."""
        self._settled: set[tuple[int, str]] = set()
        """Steps and names of parts that they have not, or not in files of their own."""

    @property
    def _drops(self) -> bool:
        return self._keep is not None and bool(self._keep.dropping)

    # -- of saves --------------------------------------------------------------------------------------------

    def saving(self, step: int) -> None:
        """A save of ``step`` begins: a deletion there is finished first, whatever became of it."""
        self._others.saving(step)
        with self._changed:
            self._unsettled[step] += 1
            unknown = not self._resumed
            self._changed.wait_for(lambda: self._dropping != step, _DROP_SECONDS)
            self._settled = {one for one in self._settled if one[0] != step}
        try:  # training waits for this: a look at this one step at the most
            if unknown or step in self._half_deleted or step in self._deleter.pending():
                self._half_deleted.discard(step)
                self._deleter.make_way(step)
        except (CheckpointError, OSError) as error:  # what is left belongs to another commit: it cannot hurt
            self._events.emit("delete_failed", step, error=error)

    def ended(self, step: int, save_id: str | None) -> None:
        """The save of ``step`` has committed: look after it in the background; or it failed."""
        if save_id is None:
            self._settle(step)
            return
        self._others.committed(step, save_id)
        with self._changed:
            self._committed.append(step)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="dcp-post-commit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # -- of the user's -------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Delete the checkpoint of ``step`` in the background."""
        if not self._delete_settled(step):
            raise CheckpointError(
                f"step {step} is being saved or verified, and cannot be deleted yet; wait() first", step=step
            )

    def _delete_settled(self, step: int) -> bool:
        """Delete the checkpoint of ``step`` in the background, unless a save of it has begun."""
        with self._changed:  # a save that begins now takes it from the deleter again
            if self._unsettled[step]:
                return False
            self._deleter.delete(step)
            return True

    def deleting(self) -> list[int]:
        """Steps that are to be deleted."""
        return self._deleter.pending()

    def doubt(self, step: int, error: CheckpointError) -> None:
        """A restore could not read ``step``: see in the background whether it is damaged, and note that.

        Until then retention neither counts nor deletes it. It is read again here, because what failed may be
        one host's view of the storage, and a checkpoint that is noted as damaged may be deleted.
        """
        with self._changed:
            self._unsettled[step] += 1
            self._doubted.append((step, str(error)))
        self._wake()

    # -- the end ---------------------------------------------------------------------------------------------

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Until all that was committed is looked after, and all that had to go is deleted."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._changed:
            if not self._changed.wait_for(self._is_idle, timeout_seconds):
                return False
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return self._deleter.wait(left)

    def close(self, timeout_seconds: float) -> bool:
        """As `wait`, and nothing is begun after it. What is cut off, the next manager here finishes."""
        begun = time.monotonic()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            done = self._thread is None or self._changed.wait_for(self._is_idle, timeout_seconds)
        left = max(0.0, timeout_seconds - (time.monotonic() - begun))
        return self._deleter.close(left) and done

    def _is_idle(self) -> bool:
        return not self._committed and not self._doubted and not self._busy

    def _settle(self, step: int) -> None:
        with self._changed:
            self._unsettled[step] -= 1

    def _unsettled_now(self) -> set[int]:
        with self._changed:
            return set(+self._unsettled)

    # -- the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._next()) is not None:
            step, look = task
            try:
                look()
            except DeleterClosedError as error:  # the time to close was over
                logger.info("%s: %s; the next manager here goes on", self._folders.root.url, error)
            except Exception as error:  # noqa: BLE001 - told; the next checkpoint is to be looked after
                self._events.emit("verify_failed", step, error=error, damaged=False)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """The next step, and what is to be done about it; what was committed goes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._committed or self._doubted or self._closed)
            if self._committed:
                step = self._committed.pop(0)
                look = partial(self._look_after, step)
            elif self._doubted:
                step, reason = self._doubted.pop(0)
                look = partial(self._look_again, step, reason)
            else:
                return None
            self._busy = True
            return step, look

    def _look_again(self, step: int, reason: str) -> None:
        """Verify a checkpoint that some rank could not read."""
        begun = time.monotonic()
        try:
            store = self._folders.store(step)
            commit = read_commit(store)
            if commit is None:
                return
            problem = problem_of(store, commit, "full")
            if problem is not None and _is_replaced(store, commit):
                return
            self._note(step, commit, problem, "full")
        finally:
            self._folders.forget(step)
            self._settle(step)
        seconds = {"verify": time.monotonic() - begun}
        if problem is not None:
            self._events.emit("verify_failed", step, seconds=seconds, error=problem, damaged=True)
            return
        logger.warning(
            "%s: a rank could not read it, but all of its bytes are right as this host sees them; it is "
            "kept. See whether all hosts see the same storage. What that rank said: %s",
            store.url,
            reason,
        )
        self._events.emit("verified", step, seconds=seconds, check="full")

    def _look_after(self, step: int) -> None:
        if not self._begun:
            self._begun = True
            self._go_on_with_what_was_left()
        try:
            self._folders.forget(step)
            if self._check != "off":
                problem = self._verify(step)
                if problem is not None:
                    self._on_damage(problem)
        finally:
            self._settle(step)
        self._others.look(step, self._unsettled_now())
        self._retain(step)

    def _go_on_with_what_was_left(self) -> None:
        """What an earlier process began here: deletions; saves that never committed; verifications that its
        end cut off."""
        try:
            half_deleted = self._folders.half_deleted()
            with (
                self._changed
            ):  # no save may begin in between: it takes a step from the deleter, or finds it clean
                for step in half_deleted:
                    if not self._unsettled[step]:
                        self._deleter.finish(step)
                self._resumed = True
            self._deleter.abandoned()
            for state in self._folders.survey(self._unsettled_now()) if self._drops else ():
                if state.dropped and state.health == "good":
                    self._others.dropping(state.step)
                    finish_drop(self._folders.store(state.step))
            if self._check != "off":
                for step in sorted(set(self._folders.unverified()) - self._unsettled_now()):
                    self._verify(step)
        except CheckpointError as error:
            logger.warning("%s: post-commit work goes on without it: %s", self._folders.root.url, error)

    def _verify(self, step: int) -> CorruptCheckpointError | None:
        """Verify, note and tell; returns what is wrong with the checkpoint."""
        begun = time.monotonic()
        store = self._folders.store(step)
        commit = read_commit(store)
        if commit is None:
            raise CheckpointNotFoundError(
                f"{store.url} was committed a moment ago and is gone: something else deletes here",
                path=store.url,
            )
        problem = problem_of(store, commit, self._check)
        if problem is not None and _is_replaced(store, commit):
            return None  # its files went with it; that save's commit is looked after next
        self._note(step, commit, problem, self._check)
        seconds = {"verify": time.monotonic() - begun}
        if problem is None:
            self._events.emit("verified", step, seconds=seconds, check=self._check)
            return None
        self._events.emit("verify_failed", step, seconds=seconds, error=problem, damaged=True)
        return CorruptCheckpointError(
            f"{store.url} is damaged, right after it was committed: {problem}. It is not counted on; look at "
            "the storage.",
            path=store.url,
            step=step,
        )

    def _note(self, step: int, commit: Commit, problem: str | None, check: Check) -> None:
        what = check if problem is None else " ".join(problem.split())[:_MAX_NOTED_CHARACTERS]
        what = what.encode(errors="replace").decode()  # names of files need not be text
        found = Verified(commit.save_id, time.time(), problem is None, what)
        self._folders.update_notes(step, lambda notes: replace(notes, verified=found))

    def _retain(self, saved: int) -> None:
        """Delete what need not stay; not yet what has just been ``saved``, whatever its step."""
        if self._keep is None:
            return
        # What is still being deleted, by the user's wish or ours, is as good as gone: counted, it would push
        # out what is to stay.
        states = self._folders.survey(self._unsettled_now() | set(self._deleter.pending()))
        plan = retention.plan(self._keep, states, time.time())
        for metric in plan.unjudged.keys() - self._warned:
            self._warned.add(metric)
            logger.warning("%s: %s", self._folders.root.url, plan.unjudged[metric])
        if (plan.delete or plan.drop) and not self._makes_durable(plan.newest):
            return
        for step in plan.delete:
            if step != saved:
                self._delete_settled(step)
                continue
            logger.warning(
                "%s is kept only until the next save, because there are newer steps, up to %d: restore() "
                "takes those. If this run has gone back, delete them",
                self._folders.checkpoint_id(step),
                states[-1].step,
            )
        for step, parts in plan.drop.items():
            wanted = [part for part in parts if (step, part.name) not in self._settled]
            if wanted and step != saved:
                self._drop(step, wanted)

    def _drop(self, step: int, parts: Sequence[Part]) -> None:
        """Drop ``parts`` of a step that stays, unless a save of it has begun. What fails is tried again after
        the next save."""
        with self._changed:
            if self._unsettled[step]:
                return
            self._dropping = step
        begun, names = time.monotonic(), ", ".join(part.name for part in parts)
        self._others.dropping(step)
        try:
            found = drop_parts(self._folders.store(step), parts, time.time())
            if found.outcome in ("absent", "shared"):
                with self._changed:  # before a save of the step goes on, of which this says nothing
                    self._settled |= {(step, part.name) for part in parts}
        except (CheckpointError, OSError) as error:
            self._events.emit("drop_failed", step, error=error, parts=names)
            return
        finally:
            self._folders.forget(step)
            with self._changed:
                self._dropping = None
                self._changed.notify_all()
        if found.outcome == "shared":
            logger.warning(
                "%s keeps its %s: it was saved without files of their own for these, so that only dcp prune "
                "--rewrite frees their %d bytes",
                found.url,
                names,
                found.shared_bytes,
            )
        elif found.outcome == "dropped":
            seconds, freed = {"drop": time.monotonic() - begun}, found.freed_bytes
            files = len(found.files)
            self._events.emit("dropped", step, seconds=seconds, size_bytes=freed, files=files, parts=names)

    def _makes_durable(self, newest: int | None) -> bool:
        """What is to be counted on has to outlast a power cut before anything else goes; whether it does."""
        if newest is None:
            return True
        try:
            facts = self._folders.facts(newest)
            if not facts.durable and self._synced != facts.save_id:
                self._folders.store(newest).make_durable()
                self._synced = facts.save_id
        except CheckpointError as error:
            logger.warning(
                "%s: nothing is deleted, because the newest checkpoint could not be made durable: %s",
                self._folders.checkpoint_id(newest),
                error,
            )
            return False
        return True

    def _on_deletion(self, event: DeletionEvent) -> None:
        seconds = {"delete": event.seconds}
        if event.kind == "deleted":
            self._events.emit(
                "deleted",
                event.step,
                seconds=seconds,
                size_bytes=event.size_bytes,
                files=event.files,
                what=event.what,
            )
        else:
            self._half_deleted.add(event.step)
            self._events.emit(
                "delete_failed", event.step, seconds=seconds, error=event.error, what=event.what
            )
