"""File systems whose inode numbers are others at each look, as FUSE mounts may have them."""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import run_program

_PROGRAM = """
import itertools, os, sys
from pathlib import Path
import torch, dcp

numbers = itertools.count(1 << 40)

def unstable(call):
    def called(*args, **options):
        found = call(*args, **options)
        others = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return os.stat_result((found[0], next(numbers), *found[2:]), others)
    return called

for name in ("stat", "lstat", "fstat"):
    setattr(os, name, unstable(getattr(os, name)))
root = Path(sys.argv[1])
assert not os.path.samestat(root.stat(), root.stat())
assert root.stat().st_mtime_ns == root.stat().st_mtime_ns

def loaded(place):
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=root / place)
    return state["w"][0].item()

for number in (1, 2):
    dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id=root / "a")
    assert loaded("a") == number
    for to, place in (("torch", "m.pt"), ("safetensors", "folder"), ("dcp", "copy")):
        dcp.convert(root / "a", root / place, to=to, executor="inline", overwrite=True)
        assert loaded(place) == number

def stop(progress):
    try:  # a second one of the same target
        dcp.convert(root / "b", root / "again", **shards)
    except dcp.errors.CheckpointConflictError:
        raise KeyboardInterrupt
    raise AssertionError("two hold it")

dcp.save({"w": torch.full((3,), 2.0), "v": torch.ones(3)}, checkpoint_id=root / "b")
shards = {"to": "safetensors", "shard_bytes": 12, "executor": "inline"}
try:
    dcp.convert(root / "b", root / "again", progress=stop, **shards)
except KeyboardInterrupt:
    pass
(work,) = root.glob(".tmp-convert-*")
assert dcp.convert(root / "b", root / "again", **shards).tasks_resumed == 1
assert loaded("again") == 2
assert not list(root.rglob(".lock")) and not list(root.glob(".tmp-*")), list(root.rglob("*"))
"""


def test_saves_and_conversions_do_not_go_by_inode_numbers(tmp_path: Path) -> None:
    """A lock is known as its holder's own, and kept from others; what is made aside is removed; a conversion
    that was stopped goes on."""
    ended = run_program("-c", _PROGRAM, tmp_path)
    assert ended.returncode == 0, ended.stderr
