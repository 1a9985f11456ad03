"""Background work after a commit: verification, retention, deletions. Runs on the coordinator only.

`dcp.manager.removal` removes a checkpoint and `dropping` drops a part.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

from dcp.inspection.verification import check_files, verify_place
from dcp.manager import retention
from dcp.manager.dropping import drop_parts, finish_drop
from dcp.manager.events import Events
from dcp.manager.removal import (
    Removed,
    abandoned_files,
    finish_removal,
    remove_abandoned,
    remove_checkpoint,
)
from dcp.manager.retention import Part, Retention
from dcp.steps import Commit, StepFolders, Verified, read_commit
from dcp.storage.commit_names import METADATA_NAME, NOTES_NAME, is_commit_object
from dcp.storage.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from dcp.storage.formats.opening import SourcePlace
from dcp.storage.stores.base import Store
from dcp.storage.stores.opening import SmallFiles

logger = logging.getLogger(__name__)

Check = Literal["sizes", "full", "off"]
"""Verification after a commit: "sizes" compares file sizes, "full" compares checksums of all bytes, "off"
nothing.
"""

_MAX_NOTED_CHARACTERS: Final = 1000
_ATTEMPTS: Final = 5
"""Attempts of a failing deletion. The pause between attempts doubles."""
_PAUSE_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 60.0
"""Longest wait of a save for a running deletion or drop of its step."""
_ABANDONED_AFTER_SECONDS: Final = 86_400.0
"""Age of uncommitted data that counts as abandoned."""
_SKEW_SECONDS: Final = 300.0
"""Tolerated difference between clocks of hosts."""


_What = Literal["commit", "doubt", "checkpoint", "rest", "abandoned"]
"""Tasks of a step: verify a commit, verify again after a failed restore, delete, finish a deletion, remove
abandoned files.
"""


@dataclass(eq=False, slots=True)
class _Task:
    step: int
    what: _What
    reason: str = ""
    attempt: int = 0
    due_seconds: float = 0.0


@dataclass(eq=False)
class AfterCommit:
    """Verify and delete checkpoints below ``folders`` in the background.

    One daemon thread verifies commits and another one deletes, so that a hanging deletion does not delay
    verification. ``on_damage`` receives the error of a damaged new commit. Failed deletions are repeated.
    """

    _folders: StepFolders
    _keep: Retention | None
    _check: Check
    _events: Events
    _on_damage: Callable[[CorruptCheckpointError], None]

    def __post_init__(self) -> None:
        self._began, self._began_seconds = time.monotonic(), time.time()
        self._since: dict[int, float] = {}
        """Start of this run's first save."""
        self._own: dict[int, str | None] = {}
        """Steps saved by this run, with the ids of their saves; None for unknown ids and for steps with
        dropped parts.
        """
        self._seen: dict[int, SmallFiles] = {}
        """Commit objects of each step at the last listing."""
        self._is_warned = False
        """True after another run was found in this folder."""
        self._changed = threading.Condition()
        self._looks: list[_Task] = []
        """Commits and doubtful steps to verify, in order of arrival."""
        self._deletions: dict[int, _Task] = {}
        """Deletions by step, in order of arrival."""
        self._changing: set[int] = set()
        """Steps with a running deletion or drop; saves of them wait."""
        self._unsettled: Counter[int] = Counter()
        """Steps being saved or verified: retention must neither count nor delete them."""
        self._threads: list[threading.Thread] = []
        """The threads for commits and deletions."""
        self._closing = False
        self._given_up = False
        self._begun = False
        self._resumed = False
        """True after unfinished deletions of earlier processes were found."""
        self._half_deleted: set[int] = set()
        """Steps with a permanently failed deletion."""
        self._synced = ""
        """The newest save made durable."""
        self._warned: set[str] = set()
        """Metrics of rules that could not be evaluated."""
        self._settled: dict[int, set[str]] = {}
        """For each step, names of parts that are absent or share files with other entries."""

    # -- of saves --------------------------------------------------------------------------------------------

    def saving(self, step: int) -> None:
        """Prepare a save of ``step``: wait for a running deletion and remove remaining files.

        A complete checkpoint stays until the commit replaces it.
        """
        self._own[step] = None
        self._since[step] = time.monotonic()
        with self._changed:
            self._unsettled[step] += 1
            looks = not self._resumed or step in self._half_deleted or step in self._deletions
            is_free = step not in self._changing or self._changed.wait_for(
                lambda: step not in self._changing, _WAIT_SECONDS
            )
            if is_free:
                self._deletions.pop(step, None)
                self._changed.notify_all()
            self._settled.pop(step, None)
            self._half_deleted.discard(step)
        try:  # training waits for this call: read one step only
            if not is_free:
                url = self._folders.checkpoint_id(step)
                text = f"the deletion of {url} has not ended after {_WAIT_SECONDS:g} s: the storage hangs"
                raise StorageError(text, path=url, op="delete")
            if looks:
                files = self._folders.root.look_into(self._folders.name(step), (NOTES_NAME,))
                if NOTES_NAME in files and not any(map(is_commit_object, files)):
                    self._remove(step, "rest")
        except (CheckpointError, OSError) as error:  # remaining files belong to another commit
            self._events.emit("delete_failed", step, error=error)

    def ended(self, step: int, save_id: str | None) -> None:
        """Queue ``step`` for verification after its save; ``save_id`` is None for a failed save."""
        if save_id is None:
            self._settle(step)
        else:
            self._own[step] = save_id
            self._later(_Task(step, "commit"))

    # -- of the user's ---------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Queue the checkpoint of ``step`` for deletion, unless a save of the step has begun."""
        with self._changed:  # a save that begins at the same time cancels the deletion
            if self._unsettled[step]:
                raise CheckpointError(
                    f"step {step} is being saved or verified and cannot be deleted yet; call wait() first",
                    step=step,
                )
            self._later(_Task(step, "checkpoint"))

    def deleting(self) -> set[int]:
        """Return the steps queued for deletion."""
        return set(self._deletions)

    def doubt(self, step: int, error: CheckpointError) -> None:
        """Verify ``step`` again in the background after a restore failed to read it.

        Retention neither counts nor deletes the step until then. The damage may be visible on one host only.
        """
        with self._changed:
            self._unsettled[step] += 1
        self._later(_Task(step, "doubt", str(error)))

    # -- the end ---------------------------------------------------------------------------------------------

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all commits are verified and all deletions done or given up; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._looks or self._deletions), timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Wait as `wait` does, without pauses between attempts, and stop. Idempotent.

        Interrupted deletions leave whole or deleted checkpoints; the next manager finishes them.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            threads = [*self._threads]
        if threading.current_thread() in threads:
            return
        done = self.wait(timeout_seconds)
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        for thread in threads if done else ():  # the threads are about to end
            thread.join(max(1.0, timeout_seconds))

    # -- the threads -----------------------------------------------------------------------------------------

    def _later(self, task: _Task) -> None:
        """Queue a task; the first one starts the threads."""
        with self._changed:
            if self._given_up:
                logger.info(
                    "%s: closed with post-commit work left, which the next manager of this folder continues",
                    self._folders.root.url,
                )
                return
            for deletes, name in ((False, "dcp-after-commit"), (True, "dcp-deletions"))[len(self._threads) :]:
                thread = threading.Thread(target=self._work, args=(deletes,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            if task.what in ("commit", "doubt"):
                self._looks.append(task)
            else:
                self._deletions.setdefault(task.step, task)
            self._changed.notify_all()

    def _work(self, deletes: bool) -> None:
        while (task := self._next(deletes)) is not None:
            again = False
            try:
                if deletes:
                    again = self._delete(task)
                elif task.what == "commit":
                    self._look_after(task.step)
                else:
                    self._look_again(task.step, task.reason)
            except Exception as error:  # noqa: BLE001 - an event; the next checkpoint is to be looked after
                self._events.emit("verify_failed", task.step, error=error, damaged=False)
            with self._changed:
                if not deletes:
                    self._looks.remove(task)
                else:
                    self._changing.discard(task.step)
                    if again:
                        task.due_seconds = time.monotonic() + _PAUSE_SECONDS * 2 ** (task.attempt - 1)
                    else:
                        self._deletions.pop(task.step, None)
                self._changed.notify_all()

    def _next(self, deletes: bool) -> _Task | None:
        """Wait for the next due task of a kind; None at the end."""
        with self._changed:
            while not self._given_up and (self._looks or self._deletions or not self._closing):
                now, due = time.monotonic(), math.inf
                for task in self._deletions.values() if deletes else self._looks:
                    if task.due_seconds > now and not self._closing:
                        due = min(due, task.due_seconds)
                    elif not deletes or task.step not in self._changing:
                        task.attempt += 1
                        if deletes:
                            self._changing.add(task.step)
                        return task
                self._changed.wait(None if math.isinf(due) else due - now)
            return None

    def _settle(self, step: int) -> None:
        with self._changed:
            self._unsettled[step] -= 1

    def _unsettled_now(self) -> set[int]:
        with self._changed:
            return set(+self._unsettled)

    # -- commits ---------------------------------------------------------------------------------------------

    def _look_after(self, step: int) -> None:
        try:
            if not self._begun:
                self._begun = True
                self._finish_earlier_work()
            self._folders.forget(step)
            if self._check != "off":
                problem = self._verify(step, self._check)
                if problem:
                    url = self._folders.checkpoint_id(step)
                    message = f"{url} is damaged after its commit: {problem}. Retention does not count it"
                    self._on_damage(
                        CorruptCheckpointError(f"{message}; check the storage.", path=url, step=step)
                    )
        finally:
            self._settle(step)
        self._look_for_other_runs(step)
        self._retain(step)

    def _finish_earlier_work(self) -> None:
        """Finish the work of an earlier process: deletions, abandoned saves, verifications."""
        try:
            half_deleted = self._folders.half_deleted()
            with self._changed:  # no save may begin between check and removal
                for step in half_deleted:
                    if not self._unsettled[step]:
                        self._later(_Task(step, "rest"))
                self._resumed = True
            for step, files in self._folders.folders().items():
                # A writer process may outlive its trainer and still commit, so wait a day.
                before_seconds = time.time() - _ABANDONED_AFTER_SECONDS
                if not any(map(is_commit_object, files)) and (
                    abandoned_files(self._folders.store(step), before_seconds) is not None
                ):
                    self._later(_Task(step, "abandoned"))
            drops = self._keep is not None and bool(self._keep.dropping)
            looks = drops or self._check != "off"
            states = self._folders.survey(self._unsettled_now()) if looks else []
            for state in states if drops else ():
                if state.dropped and state.health == "good":
                    self._own[state.step] = None
                    finish_drop(self._folders.store(state.step))
            for state in states:
                if self._check != "off" and not state.is_verified and not self._unsettled[state.step]:
                    self._verify(state.step, self._check)
        except CheckpointError as error:
            logger.warning("%s: post-commit work continues without it: %s", self._folders.root.url, error)

    def _look_again(self, step: int, reason: str) -> None:
        """Verify a checkpoint that a rank failed to read."""
        try:
            problem = self._verify(step, "full", is_known=True)
        except CheckpointNotFoundError:
            return
        finally:
            self._folders.forget(step)
            self._settle(step)
        if problem == "":
            logger.warning(
                "%s: a rank failed to read this checkpoint, but its checksums match on this host; "
                "the checkpoint is kept. Check that all hosts see the same storage. Error of the rank: %s",
                self._folders.checkpoint_id(step),
                reason,
            )

    def _verify(self, step: int, check: Check, *, is_known: bool = False) -> str | None:
        """Verify a commit, store the result and emit an event.

        Returns the problem, "" for a good checkpoint, None if another commit has replaced the files. With
        ``is_known``, the log already has the damage.
        """
        begun = time.monotonic()
        store = self._folders.store(step)
        commit = read_commit(store)
        if commit is None:
            raise CheckpointNotFoundError(
                f"{store.url} was committed and no longer exists: another process deletes files in this "
                f"folder",
                path=store.url,
            )
        problem = self._problem_of(store, commit, check)
        if problem is not None:
            present = read_commit(store)
            if present is not None and present.versions != commit.versions:
                return None
        what = check if problem is None else " ".join(problem.split())[:_MAX_NOTED_CHARACTERS]
        what = what.encode(errors="replace").decode()  # names of files may be invalid UTF-8
        found = Verified(commit.save_id, time.time(), problem is None, what)
        self._folders.update_notes(step, lambda notes: replace(notes, verified=found))
        seconds = {"verify": time.monotonic() - begun}
        if problem is None:
            self._events.emit("verified", step, seconds=seconds, check=check)
            return ""
        level = logging.INFO if is_known else None
        self._events.emit("verify_failed", step, seconds=seconds, error=problem, level=level, damaged=True)
        return problem

    @staticmethod
    def _problem_of(store: Store, commit: Commit, check: Check) -> str | None:
        """Return the problem of the commit in ``store``; None if ``check`` passes."""
        if commit.index is None:
            return str(commit.problem)
        if check == "full":
            found = verify_place(SourcePlace(store)).faults
        else:
            listing = {info.name: info for info in store.list()}
            found = [one for one in check_files(commit.index, listing) if not one.is_note]
        for fault in found:
            if fault.file == METADATA_NAME:  # only stock torch needs the file; dcp loads the checkpoint
                logger.warning("%s: %s", store.url, fault.message)
        return "; ".join([one.message for one in found if one.file != METADATA_NAME][:8]) or None

    def _look_for_other_runs(self, step: int) -> None:
        """Log the first step committed here by another live run, after a commit of ``step``.

        Two jobs with the same folder overwrite and delete each other's steps.
        """
        if self._is_warned:
            return
        try:
            folders, unsettled = self._folders.folders(), self._unsettled_now()
        except CheckpointError as error:  # retried at the next commit
            logger.debug("%s: the search for other runs failed: %s", self._folders.root.url, error)
            return
        found: dict[int, tuple[SmallFiles, float]] = {}
        for each, files in folders.items():
            objects = {name: info for name, info in files.items() if is_commit_object(name)}
            found[each] = objects, max((info.modified_seconds for info in objects.values()), default=0.0)
        # by the clock of the storage; older commits are from before this run
        since = found.get(step, ({}, 0.0))[1] - (self._since.get(step, self._began) - self._began)
        for each, (objects, moment) in found.items():
            if not objects or each in unsettled or self._seen.get(each) == objects:
                continue
            self._seen[each] = objects
            if each != step and moment > since and self._is_of_another(each):
                self._is_warned = True
                logger.warning(
                    "%s was committed by another run in the folder of this run: both runs overwrite and "
                    "delete each other's steps. Give each run a separate folder",
                    self._folders.checkpoint_id(each),
                )
                return

    def _is_of_another(self, step: int) -> bool:
        own = self._own.get(step, "")
        if own is None:
            return False
        try:
            facts = self._folders.facts(step)
        except CheckpointError:
            return False
        written = facts.committed_seconds  # an older commit, restored or with a dropped part
        is_rewritten = written is not None and written < self._began_seconds - _SKEW_SECONDS
        return facts.save_id != own and not is_rewritten

    # -- retention -------------------------------------------------------------------------------------------

    def _retain(self, saved: int) -> None:
        """Delete steps by the retention rules, except the step just ``saved``."""
        if self._keep is None:
            return
        # Steps queued for deletion do not count: otherwise they would displace steps to keep.
        states = self._folders.survey(self._unsettled_now() | self.deleting())
        plan = retention.plan(self._keep, states, time.time())
        for metric in plan.unjudged.keys() - self._warned:
            self._warned.add(metric)
            logger.warning("%s: %s", self._folders.root.url, plan.unjudged[metric])
        if (plan.delete or plan.drop) and not self._makes_durable(plan.newest):
            return
        for step in plan.delete:
            if step != saved:
                with suppress(CheckpointError):
                    self.delete(step)
                continue
            logger.warning(
                "%s will be deleted after the next save, because newer steps exist, up to %d, and restore() "
                "prefers them. To continue from this step, delete the newer steps",
                self._folders.checkpoint_id(step),
                states[-1].step,
            )
        for step, parts in plan.drop.items():
            wanted = [part for part in parts if part.name not in self._settled.get(step, ())]
            if wanted and step != saved:
                self._drop(step, wanted)

    def _drop(self, step: int, parts: Sequence[Part]) -> None:
        """Drop ``parts`` of a step, unless a save of the step has begun. A failure is retried after the next
        save.
        """
        with self._changed:
            if self._unsettled[step] or step in self._changing:
                return
            self._changing.add(step)
        begun, names = time.monotonic(), ", ".join(part.name for part in parts)
        self._own[step] = None
        try:
            found = drop_parts(self._folders.store(step), parts, time.time())
            if found.outcome in ("absent", "shared"):
                # before a save of the step continues, to which this result does not apply
                with self._changed:
                    self._settled.setdefault(step, set()).update(part.name for part in parts)
        except (CheckpointError, OSError) as error:
            self._events.emit("drop_failed", step, error=error, parts=names)
            return
        finally:
            self._folders.forget(step)
            with self._changed:
                self._changing.discard(step)
                self._changed.notify_all()
        if found.outcome == "shared":
            logger.warning(
                "%s keeps its %s, which share files with other entries; dcp prune --rewrite frees their %d "
                "bytes",
                found.url,
                names,
                found.shared_bytes,
            )
        elif found.outcome == "dropped":
            seconds, freed = {"drop": time.monotonic() - begun}, found.freed_bytes
            files = len(found.files)
            self._events.emit("dropped", step, seconds=seconds, size_bytes=freed, files=files, parts=names)

    def _makes_durable(self, newest: int | None) -> bool:
        """Sync the newest good step before a deletion; return whether it is durable."""
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

    def _delete(self, task: _Task) -> bool:
        """Delete a step and emit an event; return whether to try again."""
        step, what, url = task.step, task.what, self._folders.checkpoint_id(task.step)
        begun = time.monotonic()
        try:
            removed = self._remove(step, what)
        except Exception as error:  # noqa: BLE001 - an event; one folder must not stop the others
            # only failures of the storage are worth another attempt
            is_passing = isinstance(error, CheckpointError | OSError)
            again = is_passing and task.attempt < _ATTEMPTS and not self._closing
            outlook = "trying again later" if again else "the next manager of this folder tries again"
            logger.warning("%s could not be deleted: %s; %s", url, error, outlook)
            if not again:
                self._half_deleted.add(step)
                seconds = {"delete": time.monotonic() - begun}
                self._events.emit("delete_failed", step, seconds=seconds, error=error, what=what)
            return again
        if removed.outcome in ("pinned", "replaced"):
            logger.info("%s is not deleted: it is %s", url, removed.outcome)
        elif removed.outcome == "deleted" or task.attempt > 1:
            seconds, files = {"delete": time.monotonic() - begun}, removed.files
            size_bytes = removed.size_bytes
            self._events.emit("deleted", step, seconds=seconds, size_bytes=size_bytes, files=files, what=what)
        return False

    def _remove(self, step: int, what: _What) -> Removed:
        store = self._folders.store(step)
        try:
            if what == "abandoned":
                return remove_abandoned(store, time.time() - _ABANDONED_AFTER_SECONDS)
            remove = remove_checkpoint if what == "checkpoint" else finish_removal
            return remove(store, time.time())
        finally:
            self._folders.forget(step)
