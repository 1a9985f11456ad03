"""Fixtures that several folders of tests share: a real S3 server, and one with a faulty network before it."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import signal
import sys
import threading
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

from dcp.demo.s3_server import S3Server
from dcp.planners.garbage_collection import garbage_collection_paused
from tests.support.fault_proxy import FaultProxy
from tests.support.forking import set_preload, share_fork_server
from tests.support.programs import use_cold_programs, use_warm_programs
from tests.support.shared_servers import shared_server
from tests.support.warm_writers import use_warm_writers

# Alike on every machine: the same examples, however long a busy one takes to make and to try them. Others are
# tried with --hypothesis-profile=default.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# Before torch is there. Several processes of tests share the cores: threads of OpenMP that wait for one take
# more than half of the time of some files.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers of xdist have one, as if each had a terminal; what our commands print would be cut to it.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background has Ctrl-C ignored, in all processes below, too; tests of it
# would wait for ever.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Before 3.11.8 and 3.12.2 Python counts the depth of all trees that are being made together: where garbage is
# collected in the middle of one, and another thread makes another, it fails (python/cpython#106905). pytest,
# hypothesis and numpy make some.
if sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2):
    ast.parse = garbage_collection_paused()(ast.parse)


LONGEST = (
    "storage/stores/test_store_contract.py",
    "dcp/test_demo.py",
    "server/end_to_end/test_training.py",
    "examples/test_recipes.py",
    "dcp/manager/test_manager_ending.py",
    "faults/test_kill_async_process.py",
    "dcp/compat/test_parallel_models.py",
    "server/test_serving.py",
    "server/test_schemathesis.py",
)
"""Below tests/. They are begun first, so that at the end no worker is at one of them alone."""


# What is imported and collected stays; to look it through again and again was a third of a worker's start.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """From here on there is garbage to be collected."""
    _rewrite_a_share(session.config)
    try:
        return (yield)
    finally:
        gc.enable()


def _rewrite_a_share(config: pytest.Config) -> None:
    """Of test modules that pytest has not rewritten yet: workers collect the same files in the same order,
    so that each of them would rewrite all, which takes as long as all else."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    given = [Path(name.partition("::")[0]) for name in config.args]
    modules = sorted(path for place in given for path in ([place], place.rglob("test_*.py"))[place.is_dir()])
    for path in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        made = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not made.exists() and rewrite.try_makedirs(made.parent):
            with contextlib.suppress(OSError, SyntaxError, ValueError):  # pytest tells of it as it collects
                source, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, made)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, all others as they were; fewer examples where the exhaustive tests are left
    out."""
    tests = Path(__file__).parent
    if missing := [name for name in LONGEST if not (tests / name).exists()]:
        raise pytest.UsageError(f"LONGEST of {__file__}: {missing}: no such file")
    items.sort(key=lambda item: item.path.relative_to(tests).as_posix() not in LONGEST)
    if "not exhaustive" in config.option.markexpr:
        for test in {item.function for item in items if isinstance(item, pytest.Function)}:
            _try_fewer_examples(test)


_FEW: Final = 15
"""Examples that each test is left, if it asked for as many."""


def _try_fewer_examples(test: Any) -> None:
    """Three of ten that hypothesis makes: they are the same in each run, and `make test-all` has all."""
    if (given := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
        fewer = max(min(given.max_examples, _FEW), given.max_examples * 3 // 10)
        test._hypothesis_internal_use_settings = settings(given, max_examples=fewer)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Workers are forked from where their processes will be: what they import takes longer than to collect.
    Where CPU seconds are counted by test, each has processes of its own."""
    if not config.pluginmanager.hasplugin("tests.support.cpu_seconds") and share_fork_server():
        use_warm_programs()


def pytest_collection_finish() -> None:
    """What all tests share is there, and its garbage may stay: each ``gc.collect()`` of a test took 0.4 s to
    look through it. A fork server starts with the first test that needs a process, if it is not shared."""
    gc.freeze()
    set_preload()
    use_warm_writers()
    use_cold_programs()  # where a test wants another one, it says so


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """One SeaweedFS for all processes of the run, started by the first test that wants it.

    Without the program ``weed`` such tests fail: nothing else checks signatures and conditional writes.
    """
    return S3Server(**shared_server("s3", tmp_path_factory))


@pytest.fixture
def s3_root(s3_server: S3Server) -> str:
    """``s3://BUCKET/PREFIX``, of one test alone and with nothing below it."""
    return f"s3://{s3_server.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """The server behind a proxy of this test alone, which logs requests and spoils some if asked."""
    with FaultProxy(s3_server) as proxy:
        yield proxy
