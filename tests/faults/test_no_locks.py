"""File systems without locks, as Lustre is where it was not mounted with them: flock says ENOSYS."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_program

_WITHOUT_FLOCK = """
import errno, fcntl, sys
from tests.support.refused_calls import refuse

refuse("flock", errno.ENOSYS)
try:
    fcntl.flock(0, fcntl.LOCK_SH)
except OSError as error:
    assert error.errno == errno.ENOSYS, error
else:
    raise AssertionError("flock works")
"""

_PROGRAM = """
import threading
import torch, dcp
from pathlib import Path

root = Path(sys.argv[1])

def save(number, place="replaced"):
    dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id=root / place)

def loaded(place):
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=root / place)
    return state["w"][0].item()

for number in (1, 2):
    save(number)
    assert loaded("replaced") == number

def race(number):
    try:
        save(number, "raced")
    except dcp.errors.CheckpointConflictError:
        pass

threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert loaded("raced") in range(8)
assert len(list((root / "raced").iterdir())) == 3, list((root / "raced").iterdir())

with dcp.CheckpointManager(root / "run", keep=dcp.Retention(last=1), on_failure="raise") as manager:
    for step in range(1, 4):
        manager.save(step, {"w": torch.ones(3)})
    manager.wait()
    assert manager.all_steps() == [3]
dcp.convert(root / "replaced", root / "model.pt", to="torch", executor="inline")
assert loaded("model.pt") == 2
assert not list(root.rglob(".lock"))
"""


def test_saves_replace_race_and_go_by_retention(tmp_path: Path) -> None:
    """All that locks are for works without them, but keeping out other processes, of which one line warns."""
    ended = run_program("-c", _WITHOUT_FLOCK + _PROGRAM, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("on a file system without locks") == 1
