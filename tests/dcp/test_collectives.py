import gc
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.ranks import channel
from dcp.ranks.channel import HEAD_BYTES, Channel
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import RankFailedError
from dcp.storage.errors import CollectiveTimeoutError, CorruptCheckpointError
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.programs import Program
from tests.support.ranks import RankRaised, run_ranks

STEPS = ("reduce_scatter", "reduce_broadcast", "reduce_alike", "all_gather", "broadcast")


def take_step(ranks: Ranks, step: str, local: Any, reduce: Any) -> Any:
    """One step of the given kind."""
    if step == "reduce_scatter":
        return ranks.reduce_scatter("probe", local, lambda parts: [reduce(parts)] * len(parts))
    if step == "reduce_broadcast":
        return ranks.reduce_broadcast("probe", local, reduce)
    if step == "reduce_alike":
        return ranks.reduce_alike("probe", local, reduce)
    if step == "all_gather":
        return b"".join(ranks.all_gather("probe", local))
    return ranks.broadcast("probe", local)


def every_step(rank: int, world_size: int) -> list[Any]:
    """Results of every kind of step, with messages of different lengths, empty ones included."""
    results = []
    for step in STEPS:
        ranks = Ranks(use_dist=True, timeout_seconds=120)
        results.append(take_step(ranks, step, lambda: b"ab" * rank, b"".join))
    coordinated = Ranks(use_dist=True, coordinator=world_size - 1, timeout_seconds=120)
    results.append(coordinated.reduce_scatter("x", lambda: b"%d" % rank, lambda parts: parts[::-1]))
    return results


@pytest.mark.parametrize("world_size", [1, 3])
def test_messages_of_any_length_reach_every_rank(world_size: int) -> None:
    """Each kind of step delivers every rank's bytes, whatever their lengths, and any rank can coordinate."""
    results = run_ranks(world_size, every_step)
    together = b"".join(b"ab" * rank for rank in range(world_size))
    for rank, result in enumerate(results):
        assert result == [*[together] * 4, b"", b"%d" % (world_size - 1 - rank)]


def messages_of_lengths(rank: int, world_size: int, step: str, lengths: list[int]) -> list[bytes]:
    """One step after the other, with this rank's message longer each time; then a failure whose description
    is longer than what one exchange takes."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)
    results = [take_step(ranks, step, lambda n=n: b"%d" % rank * n * rank, b"".join) for n in lengths]

    def local() -> bytes:
        if rank == 1:
            raise CorruptCheckpointError("bits flipped" * 100, path="file-7", fqn="w")
        return b"x"

    with pytest.raises(CorruptCheckpointError, match="bits flipped" * 100):
        take_step(ranks, step, local, b"".join)
    return results


@pytest.mark.parametrize("step", ["reduce_broadcast", "reduce_alike", "all_gather"])
def test_what_one_exchange_does_not_take_follows_in_another(step: str) -> None:
    """Messages around the length that one collective takes, be it one rank's alone that is longer."""
    lengths = [0, 1, *range(HEAD_BYTES - 10, HEAD_BYTES + 2), 5 * HEAD_BYTES]
    for results in run_ranks(3, messages_of_lengths, step, lengths):
        assert results == [b"".join(b"%d" % rank * n * rank for rank in range(3)) for n in lengths]


def failing_step(rank: int, world_size: int, step: str, failing: int, where: str) -> Any:
    """A typed error of one rank, in its own part or in the coordinator's."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)

    def local() -> bytes:
        if where == "local" and rank == failing:
            raise CorruptCheckpointError("bits flipped", path="file-7", fqn="w")
        return b"x"

    def reduce(parts: list[bytes]) -> bytes:
        if where == "reduce":
            raise CorruptCheckpointError("bits flipped", path="file-7", fqn="w")
        return b""

    try:
        take_step(ranks, step, local, reduce)
    except RankFailedError as error:
        after = take_step(Ranks(use_dist=True, timeout_seconds=120), "all_gather", lambda: b"y", None)
        cause = error.__cause__
        return (
            isinstance(error, CorruptCheckpointError),
            error.ranks,
            error.path,
            "bits flipped" in str(error),
            isinstance(cause, CorruptCheckpointError),
            after,
        )
    return "no error"


@pytest.mark.parametrize("step", STEPS)
def test_one_ranks_error_is_raised_on_all_with_rank_and_cause(step: str) -> None:
    """The error is of the cause's class, names the rank and carries the facts; the group stays usable."""
    failing = 0 if step == "broadcast" else 2
    for result in run_ranks(3, failing_step, step, failing, "local"):
        assert result == (True, [failing], "file-7", True, True, b"yyy")


@pytest.mark.parametrize("step", ["reduce_scatter", "reduce_broadcast", "reduce_alike"])
def test_the_coordinators_error_is_raised_on_all(step: str) -> None:
    """What goes wrong while results are merged is everybody's error, from rank 0."""
    for result in run_ranks(3, failing_step, step, 0, "reduce"):
        assert result == (True, [0], "file-7", True, True, b"yyy")


def several_fail(rank: int, world_size: int) -> Any:
    """Two ranks fail in different ways."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)

    def local() -> bytes:
        if rank == 1:
            raise ValueError("one")
        if rank == 2:
            raise CorruptCheckpointError("two")
        return b""

    try:
        ranks.all_gather("probe", local)
    except RankFailedError as error:
        return error.ranks, "one" in str(error), "two" in str(error), type(error.failures[1][0]).__name__
    return None


def test_all_failing_ranks_are_reported_together() -> None:
    """Different errors of several ranks come as one, with each in ``failures`` by rank."""
    results = run_ranks(3, several_fail)
    assert results[0] == ([1, 2], True, True, "RemoteError")
    assert results[1] == ([1, 2], True, True, "ValueError")


def lose_rank(rank: int, world_size: int, step: str, lost: int, how: str) -> None:
    """One rank is killed, or stays away longer than the others wait."""
    ranks = Ranks(use_dist=True, timeout_seconds=120.0)
    take_step(ranks, "all_gather", lambda: b"", None)
    ranks.timeout_seconds = 6.0 if how == "stay away" else 120.0

    def local() -> bytes:
        if rank == lost and how == "kill":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == lost:
            wait_for_others(rank, world_size)
        return b"x"

    try:
        take_step(ranks, step, local, lambda parts: b"")
    finally:
        say_done(rank)


def say_done(rank: int) -> None:
    """For `wait_for_others` of another rank."""
    default_store().set(f"done/{rank}", "1")


def wait_for_others(rank: int, world_size: int) -> None:
    """Until all others have said that they are done."""
    default_store().wait([f"done/{r}" for r in range(world_size) if r != rank], timedelta(seconds=120))


def default_store() -> Any:
    """The store of the default group."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def interrupted_rank(rank: int, world_size: int) -> str:
    """Ctrl-C reaches rank 1 while it waits for rank 0, which comes later; rank 2 waits all the time.

    Rank 1 has said what it had to say in the first step, which the others may so complete.
    """
    ranks = Ranks(use_dist=True, timeout_seconds=120)

    def local() -> bytes:
        if rank == 0:
            default_store().wait(["interrupted"], timedelta(seconds=120))
        if rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return b""

    try:
        ranks.all_gather("probe", local)
        ranks.all_gather("next", local)
    except KeyboardInterrupt:
        default_store().set("interrupted", "1")
        wait_for_others(rank, world_size)  # it does not die: its connections stay open
        return "interrupted"
    finally:
        say_done(rank)
    return "done"


def rank_without_memory(rank: int, world_size: int) -> str:
    """Rank 0 has not the memory to take the others' messages, and lives on."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)
    message = bytes(48 << 20)
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def local() -> bytes:
        if rank == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (60 << 20), limits[1]))
        return message

    try:
        ranks.reduce_broadcast("probe", local, lambda parts: b"")
    except (MemoryError, RuntimeError) as error:
        if rank != 0:
            raise
        resource.setrlimit(resource.RLIMIT_AS, limits)
        wait_for_others(rank, world_size)
        return type(error).__name__
    finally:
        say_done(rank)
    return "done"


def out_of_step(rank: int, world_size: int) -> None:
    """Rank 0 takes another kind of step than the others. That it has what it wants after its first exchange
    shows in the next step."""
    ranks = Ranks(use_dist=True, timeout_seconds=6)
    for _ in range(2):
        take_step(ranks, "all_gather" if rank == 0 else "reduce_broadcast", lambda: b"x", b"".join)


def two_operations(rank: int, world_size: int) -> None:
    """Rank 2 takes no part in the first operation, and knows nothing of its end when the second begins."""
    first = Ranks(use_dist=True, timeout_seconds=4, operation="first")
    if rank < 2:
        with pytest.raises(CollectiveTimeoutError, match="rank 2 of 3 died or did not answer"):
            first.all_gather("probe", lambda: b"")
    say_done(rank)
    wait_for_others(rank, world_size)
    second = Ranks(use_dist=True, timeout_seconds=600, operation="second")
    try:
        second.all_gather("probe", lambda: b"x")
    finally:  # who ends takes its connections along, by which the others would learn of it
        default_store().set(f"second/{rank}", "1")
        default_store().wait([f"second/{r}" for r in range(world_size)], timedelta(seconds=120))


def give_up_and_destroy(rank: int, world_size: int) -> float:
    """Rank 1 never comes to the step of rank 0, which then destroys its group: the seconds that takes."""
    if rank == 1:
        wait_for_others(rank, world_size)
        return 0.0
    store = default_store()
    with pytest.raises(CollectiveTimeoutError):
        Ranks(use_dist=True, timeout_seconds=1).all_gather("probe", lambda: b"")
    begun = time.monotonic()
    dist.destroy_process_group()
    gc.collect()
    seconds = time.monotonic() - begun
    store.set("done/0", "1")
    return seconds


Killed = tuple[str, int]
KILLED: list[Killed] = [("reduce_scatter", 0), ("reduce_broadcast", 2), ("all_gather", 0)]
"""In which step which rank dies; the other ranks that may are `ALSO_KILLED`."""
ALSO_KILLED: list[Killed] = [(step, 2 - lost) for step, lost in KILLED]


def _killed(cases: list[Killed]) -> dict[Any, Group]:
    return {killed: Group(4, lose_rank, (*killed, "kill")) for killed in cases}


_BROKEN: dict[Any, Group] = {
    **_killed(KILLED),
    "stays away": Group(3, lose_rank, ("reduce_scatter", 1, "stay away")),
    "interrupted": Group(3, interrupted_rank),
    "without memory": Group(3, rank_without_memory),
    "out of step": Group(3, out_of_step),
    "two operations": Group(3, two_operations),
    "destroyed": Group(2, give_up_and_destroy),
}
"""Groups whose ranks wait for some that do not come, side by side: each takes seconds, and little work."""


def _break(groups: dict[Any, Group]) -> dict[Any, list[Ending]]:
    return dict(zip(groups, run_groups([*groups.values()], at_once=len(groups)), strict=True))


@pytest.fixture(scope="module")
def broken() -> dict[Any, list[Ending]]:
    """How the ranks of each group ended."""
    endings: dict[Any, list[Ending]] = in_lab(_break, _BROKEN)
    return endings


def raised(ending: Ending) -> RankRaised:
    """The CollectiveTimeoutError that a rank got, long before the timeout of the steps."""
    assert ending.raised is not None, ending
    assert "CollectiveTimeoutError" in ending.raised.class_names, ending.raised.traceback_text
    assert ending.raised.seconds < 100
    return ending.raised


@pytest.mark.parametrize(("step", "lost"), KILLED)
def test_a_killed_rank_is_named_by_all_others_in_time(
    broken: dict[Any, list[Ending]], step: str, lost: int
) -> None:
    """SIGKILL of any rank, the coordinator too, makes the others raise within seconds, naming it."""
    assert_named(broken[step, lost], lost)


@pytest.mark.exhaustive
def test_other_killed_ranks_are_named_by_all_others_in_time() -> None:
    """In each step the one that the test above leaves out."""
    for (_, lost), endings in in_lab(_break, _killed(ALSO_KILLED)).items():
        assert_named(endings, lost)


def assert_named(endings: list[Ending], lost: int) -> None:
    """By all that were not killed."""
    for rank, ending in enumerate(endings):
        if rank == lost:
            assert ending.killed
            continue
        error = raised(ending)
        assert error.facts["ranks"] == [lost], error.message


def test_a_rank_that_stays_away_is_named_after_the_timeout(broken: dict[Any, list[Ending]]) -> None:
    """A hanging rank ends the others' wait at their timeout, and is the one they name."""
    for rank in (0, 2):
        error = raised(broken["stays away"][rank])
        assert error.facts["ranks"] == [1], error.message


def test_an_interrupted_rank_does_not_keep_the_others(broken: dict[Any, list[Ending]]) -> None:
    """A rank that leaves a step by Ctrl-C and lives on is named by the others long before their timeout, in
    that step or the next."""
    endings = broken["interrupted"]
    assert endings[1].value == "interrupted"
    for rank in (0, 2):
        error = raised(endings[rank])
        assert error.facts["ranks"] == [1], error.message


def test_a_rank_that_cannot_take_messages_does_not_keep_the_others(broken: dict[Any, list[Ending]]) -> None:
    """What is raised within an exchange, on one rank alone, ends the others' wait long before their
    timeout."""
    first, *others = broken["without memory"]
    assert first.value in ("MemoryError", "RuntimeError"), first
    for ending in others:
        error = raised(ending)
        assert error.facts["ranks"] == [0], error.message


def test_ranks_that_are_out_of_step_are_not_called_dead(broken: dict[Any, list[Ending]]) -> None:
    """Where all give a sign of life the error says so, and blames none."""
    for ending in broken["out of step"]:
        error = raised(ending)
        assert "all 3 ranks are alive, but not in one step" in error.message
        assert error.facts["ranks"] == []


def test_a_group_that_is_out_of_step_says_so_at_once(broken: dict[Any, list[Ending]]) -> None:
    """After an operation that some ranks left, the next one fails on all ranks without waiting for anybody,
    instead of taking one step's messages for those of another."""
    for rank, ending in enumerate(broken["two operations"]):
        error = raised(ending)
        assert "second failed in step 'probe': the ranks of the process group are not in" in error.message
        assert "since an earlier first failed" in error.message
        assert ("rank 2 of 3 died or did not answer" in error.message) == (rank < 2)


def test_a_group_whose_step_was_given_up_is_destroyed_at_once(broken: dict[Any, list[Ending]]) -> None:
    """Not when torch's timeout of the collective that is under way has passed."""
    endings = broken["destroyed"]
    assert endings[0].raised is None, endings[0].raised
    assert max(ending.value for ending in endings) < 30


_LEAVING = """
import sys
import torch.distributed as dist
from dcp.ranks.collectives import Ranks
from dcp.storage.errors import CollectiveTimeoutError

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
if rank == 1:
    sys.stdin.read()
    sys.exit()
try:
    Ranks(use_dist=True, timeout_seconds=1).all_gather("probe", lambda: b"")
except CollectiveTimeoutError:
    print("gave up")
"""


def test_a_process_that_gave_a_step_up_ends_at_once(tmp_path: Path) -> None:
    """Nor does the end of the interpreter wait for the collective; the other rank lives on meanwhile."""

    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    store = tmp_path / "store"
    ranks = [Program("-c", _LEAVING, str(rank), store, finalizes=rank == 0, **pipes) for rank in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        told = [line for line in output.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 greets
        assert (told, ranks[0].returncode) == (["gave up"], 0)
    finally:
        ranks[0].kill()
        ranks[1].communicate()


def operation_after_an_interrupt(rank: int, world_size: int) -> list[bytes]:
    """The first operation of a rank that is alone is left within an exchange."""
    first = Ranks(use_dist=True, timeout_seconds=60)

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first._guard("probe", interrupted)
    return Ranks(use_dist=True, timeout_seconds=60).all_gather("probe", lambda: b"x")


def test_the_end_waits_for_threads_that_drop_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete work that Python has let go, and a thread of the group's has not: where that drops it after
    the interpreter has ended, the process aborts."""
    monkeypatch.setattr(channel, "_works", [])
    with tempfile.TemporaryDirectory() as folder:
        group = Channel.own_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1, timeout_seconds=60).group
        factor = torch.ones(3, requires_grad=True)
        tensor = torch.zeros(3)
        other_owner = [factor * tensor]  # autograd has a reference that is none of Python's
        for sent in (tensor, torch.zeros(3)):
            work = Channel.begun(group.allreduce([sent]), sent)
            work.wait()
        assert [one.work is None for one in channel._works] == [True, False]
        dropped = threading.Timer(0.3, other_owner.clear)
        dropped.start()
        channel._let_works_go()
        assert not other_owner
        dropped.join()


def test_finished_exchanges_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next one their tensors are gone: of a save's plans they may be large."""
    monkeypatch.setattr(channel, "_works", [])
    with tempfile.TemporaryDirectory() as folder:
        group = Channel.own_gloo(dist.FileStore(f"{folder}/store", 1), 0, 1, timeout_seconds=60).group
        for tensor in (torch.zeros(3), torch.zeros(3)):
            Channel.begun(group.allreduce([tensor]), tensor).wait()
            deadline = time.monotonic() + 60
            while any(one.is_held() for one in channel._works) and time.monotonic() < deadline:
                time.sleep(0.001)
        assert [one.tensors for one in channel._works] == [(tensor,)]


def test_one_rank_is_always_in_step_with_itself() -> None:
    """A group of one, which an interrupt has ended an operation of, serves on."""
    assert run_ranks(1, operation_after_an_interrupt) == [[b"x"]]


def long_message_of_the_coordinator(rank: int, world_size: int) -> tuple[int, bytes, int]:
    """Rank 0 has a long message to take part with, and then one to keep, and memory for little more."""
    ranks = Ranks(use_dist=True, timeout_seconds=120)
    message = bytes(48 << 20) if rank == 0 else b"%d" % rank
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def reduce(parts: list[bytes]) -> list[bytes]:
        return [message, *parts[1:]]

    if rank == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (170 << 20), limits[1]))
    try:
        gathered = ranks.reduce_broadcast("probe", lambda: message, lambda parts: b"%d" % len(parts[0]))
        scattered = ranks.reduce_scatter("probe", lambda: message, reduce)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return int(gathered), scattered[:10], len(scattered)


def test_the_coordinators_own_message_does_not_make_the_others_as_long() -> None:
    """What it tells itself, such as all values that ranks share, is not received once for each rank."""
    results = run_ranks(4, long_message_of_the_coordinator)
    assert results[0] == (48 << 20, bytes(10), 48 << 20)
    assert results[1:] == [(48 << 20, b"%d" % rank, 1) for rank in (1, 2, 3)]


def exchanges_of_loads(rank: int, world_size: int, root: str) -> tuple[int, int]:
    """How many collectives a load takes into plain values, and into an object."""
    torch.manual_seed(0)  # ranks that served other tests before have drawn different numbers
    model = torch.nn.Linear(8, 8)
    dcp.save({"model": model.state_dict(), "step": 1}, checkpoint_id=root)
    waits: list[Any] = []
    wait = Ranks._wait

    def counted(ranks: Ranks, work: Any) -> None:
        waits.append(work)
        wait(ranks, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_wait", counted)
        dcp.load({"model": model.state_dict(), "step": 0}, checkpoint_id=root)
        plain = len(waits)
        dcp.load({"model": model, "step": 0}, checkpoint_id=root)
    return plain, len(waits) - plain


def test_a_load_takes_few_exchanges(tmp_path: Path) -> None:
    """Each is a moment at which all ranks have to have a core: the handshake, the index, the plan, the end of
    reading, the values; and one more where objects are given their state. All but that of the index are a
    gather and a broadcast."""
    assert run_ranks(3, exchanges_of_loads, str(tmp_path / "x")) == [(9, 11)] * 3


def keys_of_an_earlier_life(rank: int, world_size: int) -> list[bytes]:
    """The store has what ranks posted who died in the same operations before a restart."""
    group = dist.group.WORLD
    assert group is not None
    store = group.get_group_store()
    for serial in range(8):
        store.set(f"dcp/save/{serial}/abort", "1")
        store.set(f"dcp/load/{serial}/abort", "1")
    ranks = Ranks(use_dist=True, timeout_seconds=60)
    late = 1.5 if rank == 1 else 0.0  # long enough for the others to look for an abort

    def local() -> bytes:
        time.sleep(late)
        return b"%d" % rank

    return ranks.all_gather("probe", local)


def test_what_an_earlier_life_left_in_the_store_is_not_heeded() -> None:
    """torchrun keeps its store over restarts: aborts of ranks that died are none of today's."""
    assert run_ranks(3, keys_of_an_earlier_life) == [[b"0", b"1", b"2"]] * 3


def save_after_the_group_has_gone(rank: int, world_size: int, root: str) -> str:
    """The group is passed on, but was destroyed."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    try:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=root, process_group=group)
    except dcp.CheckpointError as error:
        return str(error)
    return "saved"


def test_a_destroyed_group_is_not_silently_left_out(tmp_path: Path) -> None:
    """Ranks of a group that is gone do not each save alone to the same id."""
    for message in run_ranks(2, save_after_the_group_has_gone, str(tmp_path / "x")):
        assert "not initialised any more" in message
    assert not (tmp_path / "x").exists()
