"""Training jobs as torchrun starts them; ranks are forked from a process that has imported torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.programs import Program

__all__ = ["torchrun"]

_LAUNCHER = """
import runpy, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(module, *arguments):
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)

_, ranks, *command = sys.argv
here = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
config = LaunchConfig(1, 1, int(ranks), max_restarts=0, start_method="fork", **here)
config.logs_specs = DefaultLogsSpecs("/dev/null")
elastic_launch(config, rank)(*command)
"""
_ROOT = Path(__file__).parents[2]
_SHOWN_CHARACTERS = 8000
_GRACE_SECONDS = 60.0


def torchrun(
    module: str,
    arguments: Sequence[str | Path],
    *,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    seconds: float = 400.0,
) -> str:
    """Run ``module`` on ``ranks`` ranks to its end; return the output.

    AssertionError with the output if the job fails or takes longer than ``seconds``; the job is ended then.
    """
    process = Program(
        *("-c", _LAUNCHER, str(ranks), module, *map(str, arguments)),
        env=_environment(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
        raise AssertionError(f"{module}: not within {seconds:g} s\n{output[-_SHOWN_CHARACTERS:]}") from None
    except BaseException:
        _end(process)
        raise
    assert process.returncode == 0, f"{module}: {process.returncode}\n{output[-_SHOWN_CHARACTERS:]}"
    return output


def _end(process: Program) -> None:
    process.terminate()  # torchrun ends the ranks, which are in sessions of their own
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process, without variables set by another launcher."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in foreign and not name.startswith(("TORCHELASTIC_", "PET_", "DCP_"))
    }
    path = os.pathsep.join(filter(None, (str(_ROOT), kept.get("PYTHONPATH"))))
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    if Path("/sys/class/net/lo").exists():
        kept["GLOO_SOCKET_IFNAME"] = "lo"
    return kept | dict(extra)
