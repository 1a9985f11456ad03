"""Error output of common mistakes: a few lines in the user's terms."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import dcp
from tests.support.ranks import run_ranks

MAX_LINES = 12
MAX_COLUMNS = 400


def model() -> torch.nn.Module:
    """Return a model with too many tensors to name all of them."""
    return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 6)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two steps, a Hugging Face folder with another name prefix, and a pickled module."""
    root = tmp_path_factory.mktemp("places")
    state = model().state_dict()
    for step in (10, 20):
        dcp.save({"model": state, "step": step}, checkpoint_id=root / f"run/step-{step:08d}", no_dist=True)
    (root / "hf").mkdir()
    save_file({f"transformer.{name}": value for name, value in state.items()}, root / "hf/model.safetensors")
    torch.save(model(), root / "pickled.pt")
    return root


def shown(act: Callable[[], Any]) -> str:
    """Return the interpreter's output for the error that ``act`` raises."""
    with pytest.raises(Exception) as caught:
        act()
    trace = caught.value.__traceback__
    while trace is not None and trace.tb_next is not None and _is_here(trace.tb_next):
        trace = trace.tb_next  # an error in a script has one frame
    return "".join(traceback.format_exception(type(caught.value), caught.value, trace))


def _is_here(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename == __file__


def load(state: Any, where: Path, **options: Any) -> None:
    """Load in a single process."""
    dcp.load(state, checkpoint_id=where, no_dist=True, **options)


STEP = "run/step-00000020"
WEIGHT = "layers.0.linear1.weight"
MANAGED: dict[str, Callable[[Any], Any]] = {
    "restore": lambda manager: manager.restore({"model": {"absent": torch.zeros(1)}}),
    "no such step": lambda manager: manager.restore({"step": 0}, step=30),
    "delete": lambda manager: manager.delete(30),
}


def with_manager(root: Path, act: Callable[[Any], Any]) -> None:
    """Call ``act`` with a manager of the run."""
    with dcp.CheckpointManager(root / "run", no_dist=True, handle_sigterm=False) as manager:
        act(manager)


def save(state: Any, where: Path, **options: Any) -> None:
    """Save in a single process."""
    dcp.save(state, checkpoint_id=where, no_dist=True, **options)


def save_later(state: Any, where: Path) -> None:
    """Save in the background."""
    dcp.async_save(state, checkpoint_id=where, no_dist=True).result()


def weight(*shape: int, dtype: Any = None, name: str = WEIGHT) -> dict[str, Any]:
    """Return a state with one entry of a model."""
    return {"model": {name: torch.zeros(shape, dtype=dtype)}}


MISTAKES: dict[str, Callable[[Path], Any]] = {
    "wrong key": lambda root: load(weight(16, 8, name="layers.0.linear1.weigth"), root / STEP),
    "no key at all": lambda root: load({"net": model().state_dict()}, root / STEP),
    "shape": lambda root: load(weight(16, 9), root / STEP),
    "dtype": lambda root: load(weight(16, 8, dtype=torch.int8), root / STEP),
    "no such path": lambda root: load({"step": 0}, root / "run/step-00000030"),
    "run folder": lambda root: load({"step": 0}, root / "run"),
    "other names": lambda root: load(model().state_dict(), root / "hf"),
    "pickled module": lambda root: load(model().state_dict(), root / "pickled.pt"),
    "swapped in load": lambda root: dcp.load(str(root / STEP), {"step": 0}),  # type: ignore
    "swapped in save": lambda root: dcp.save(str(root / "x"), {"step": 0}),  # type: ignore
    "swapped in async_save": lambda root: dcp.async_save(str(root / "x"), checkpoint_id={}),  # type: ignore
    "no place": lambda root: dcp.save({"step": 0}),
    "value": lambda root: save({"f": lambda: 0}, root / "x"),
    "async_save": lambda root: save_later({"f": lambda: 0}, root / "x"),
    "async_save, staging": lambda root: save_later({"t": torch.zeros(2)}, root / "pickled.pt/x"),
    "convert": lambda root: dcp.convert(root / "run", root / "x.safetensors", to="safetensors"),
    "open_index": lambda root: dcp.open_index(root / "run"),
    "read": lambda root: dcp.read(root / "run"),
    "merge": lambda root: dcp.merge([root / "run"], root / "x"),
    **{
        f"manager, {name}": partial(lambda act, root: with_manager(root, act), act)
        for name, act in MANAGED.items()
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_shown_in_a_few_lines(places: Path, mistake: str) -> None:
    """The output is the call and the message, within a limit of lines and columns."""
    text = shown(lambda: MISTAKES[mistake](places))
    lines = text.splitlines()
    assert len(lines) <= MAX_LINES, text
    assert max(map(len, lines)) <= MAX_COLUMNS, text


def test_short_errors_keep_class_and_cause(places: Path) -> None:
    """Programs find the class of the cause, RankFailedError, the ranks, and torch's failures by rank."""
    with pytest.raises(dcp.MissingKeyError) as caught:
        MISTAKES["wrong key"](places)
    error: Any = caught.value
    assert isinstance(error, dcp.RankFailedError) and isinstance(error, dcp.CheckpointException)
    assert error.ranks == [0]
    assert error.fqns == ["model.layers.0.linear1.weigth"]
    cause, summary = error.failures[0]
    assert type(cause) is dcp.errors.MissingKeyError and len(summary) > 3
    assert error.__cause__ is None and error.__context__ is cause
    assert str(error).startswith(str(cause)) and str(error).endswith("(failed on rank 0 in step 'plan')")
    writer = dcp.FileSystemWriter(places / "run/step-00000010", overwrite=False)
    with pytest.raises(dcp.CheckpointError, match=r"\(failed on rank 0 in step 'prepare'\)"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True)


class _Acts:
    """A `Stateful` of a user, which calls a given function."""

    def __init__(self, act: Callable[[], Any] = lambda: {"value": 1 / 0}) -> None:
        self.act = act

    def state_dict(self) -> Any:
        return self._collect()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("of the user")

    def _collect(self) -> Any:
        return self.act()


def test_dcp_debug_shows_all_frames(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With DCP_DEBUG=1 the error has all frames and its cause."""
    monkeypatch.setenv("DCP_DEBUG", "1")
    text = shown(lambda: MISTAKES["wrong key"](places))
    assert "in plan_load" in text and "direct cause" in text


def test_errors_in_user_code_keep_their_traceback(places: Path, tmp_path: Path) -> None:
    """An error in a user's code keeps its traceback from the first frame outside of this package, also as the
    cause of a load's error."""
    text = shown(lambda: save({"app": _Acts()}, tmp_path / "x"))
    assert '{"value": 1 / 0}' in text and "ZeroDivisionError" in text
    assert "state_dict_saver.py" not in text and "collectives.py" not in text
    loading = shown(lambda: load({"x": _Acts(lambda: {"step": 0})}, places / STEP, rename={r"^x\.": ""}))
    assert 'raise KeyError("of the user")' in loading
    assert max(len(each.splitlines()) for each in (text, loading)) <= 20


@pytest.mark.parametrize("wrong", [[1], "text", {"o": object()}, {1: 2}, {"t": torch.ones(1)}])
def test_user_metadata_is_checked_before_a_write(wrong: Any, tmp_path: Path) -> None:
    """Invalid user_metadata is refused at the beginning, not after hours of saving."""
    place = tmp_path / "x"
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(dcp.errors.OptionError, match="user_metadata"):
            save({"a": 1}, checkpoint_id=place, no_dist=True, user_metadata=wrong)
    assert not place.exists()


def mistakes_of_ranks(rank: int, world_size: int, root: Path) -> dict[str, str]:
    """Return the output on each rank for several mistakes."""
    found = {}
    app: Any = _Acts() if rank == 0 else {"value": 1}
    found["of one rank"] = shown(lambda: dcp.save({"app": app}, checkpoint_id=root / "broken"))
    found["other keys on each rank"] = shown(
        lambda: dcp.load({f"absent-{rank}": torch.zeros(2)}, checkpoint_id=root / STEP)
    )
    step = (20, 30)[rank]
    found["other places"] = shown(
        lambda: dcp.load({"step": 0}, checkpoint_id=root / f"run/step-{step:08d}", timeout_seconds=60)
    )
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        state = {"t": torch.zeros(2)}
        found["alone"] = shown(lambda: dcp.save(state, checkpoint_id=root / "x", timeout_seconds=2))
        store.set("done", "1")
    else:
        while not store.check(["done"]):
            time.sleep(0.1)
    return found


def test_errors_on_ranks_are_short(places: Path) -> None:
    """Errors on one rank, on each, and of a rank alone are short; the user's frames are on all ranks."""
    results = run_ranks(2, mistakes_of_ranks, places)
    for rank, found in enumerate(results):
        for mistake, text in found.items():
            limit = 30 if mistake == "of one rank" else MAX_LINES
            assert len(text.splitlines()) <= limit, (rank, mistake, text)
        assert '{"value": 1 / 0}' in found["of one rank"]
        assert "collectives.py" not in found["of one rank"]
        assert "/run has step-00000020, step-00000010." in found["other places"]
        other_keys = found["other keys on each rank"]
        assert "rank 0: Missing" in other_keys and "rank 1: Missing" in other_keys
