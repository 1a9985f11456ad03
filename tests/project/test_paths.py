"""The main operations enter few functions and modules: so much a reader has to open to follow one."""

from __future__ import annotations

import json

from tests.support.programs import run_program

MOST = {"save": (373, 61), "load": (390, 68), "convert": (420, 60), "manager.save": (298, 54)}
"""(functions, modules) of ours that the second call of each enters: three entries, one rank. They only go
down; `docs/design/core.md` says what they are to become."""

_COUNT = """
import collections, json, os, sys, tempfile, threading
import torch, dcp
home = os.path.dirname(os.path.dirname(os.path.realpath(dcp.__file__)))
state = {"model": {"w": torch.randn(64, 64), "b": torch.randn(64)}, "step": 3}
into = {"model": {"w": torch.zeros(64, 64), "b": torch.zeros(64)}, "step": 0}
top = tempfile.mkdtemp(dir=sys.argv[1])
manager = dcp.CheckpointManager(f"{top}/run", no_dist=True)
operations = {
    "save": lambda at: dcp.save(state, checkpoint_id=f"{top}/save{at}", no_dist=True),
    "load": lambda at: dcp.load(into, checkpoint_id=f"{top}/save0", no_dist=True),
    "convert": lambda at: dcp.convert(f"{top}/save0", f"{top}/{at}.pt", to="torch", executor="inline"),
    "manager.save": lambda at: manager.save(at, state),
}
found = {}
for name, operation in operations.items():
    operation(0)
    seen = set()
    def profile(frame, event, _):
        path = os.path.realpath(frame.f_code.co_filename)
        if event == "call" and path.startswith((home + "/dcp/", home + "/storage/", home + "/planners/")):
            seen.add((path, frame.f_code.co_qualname))
    threading.setprofile(profile)
    sys.setprofile(profile)
    operation(1)
    sys.setprofile(None)
    threading.setprofile(None)
    found[name] = len(seen), len({path for path, _ in seen})
manager.close()
print(json.dumps(found))
"""


def test_the_main_operations_stay_short(tmp_path: object) -> None:
    """Another function on the way of a save has to take one away."""
    done = run_program("-c", _COUNT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {
        name for name, counts in found.items() if any(n > m for n, m in zip(counts, MOST[name], strict=True))
    } == set(), found
