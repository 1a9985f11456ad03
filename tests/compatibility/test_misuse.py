"""Arguments in the wrong place: errors that name the right place."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp


def test_a_module_as_state_dict_is_refused(tmp_path: Path) -> None:
    """save, async_save and load refuse a module, and say what to pass."""
    module = torch.nn.Linear(2, 2)
    with pytest.raises(dcp.errors.PlanError, match=r"not a Linear: pass .* with the Linear as a value"):
        dcp.save(module, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[arg-type]
    future = dcp.async_save(module, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[arg-type]
    with pytest.raises(dcp.errors.PlanError, match="not a Linear"):
        future.result(240)
    with pytest.raises(dcp.errors.PlanError, match="not a list: pass a dict"):
        dcp.save([torch.ones(2)], checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[arg-type]
    dcp.save({"model": module}, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(dcp.errors.PlanError, match=r"not a Linear: pass .* with the Linear as a value"):
        dcp.load(module, checkpoint_id=tmp_path / "b", no_dist=True)  # type: ignore[arg-type]
    assert not (tmp_path / "a" / ".metadata").exists()


@pytest.mark.filterwarnings("ignore:The argument order")
def test_a_path_as_storage_is_refused(tmp_path: Path) -> None:
    """The second positional argument is the storage, as before torch 2.2."""
    with pytest.raises(dcp.CheckpointError, match=f"checkpoint_id='{tmp_path}'"):
        dcp.save({"a": torch.ones(2)}, str(tmp_path))  # type: ignore[call-arg]
    with pytest.raises(dcp.CheckpointError, match=f"as storage_reader.*checkpoint_id='{tmp_path}'"):
        dcp.load({"a": torch.ones(2)}, tmp_path)  # type: ignore[call-arg]
    with pytest.raises(dcp.CheckpointError, match="as storage_writer"):
        dcp.async_save({"a": torch.ones(2)}, storage_writer=str(tmp_path))  # type: ignore[arg-type]


def test_swapped_storages_are_refused(tmp_path: Path) -> None:
    """A writer as storage_reader, the reverse, or a class is refused before any access."""
    writer, reader = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
    with pytest.raises(dcp.CheckpointError, match="FileSystemWriter is not a storage_reader"):
        dcp.load({"a": torch.ones(2)}, storage_reader=writer, no_dist=True)  # type: ignore[arg-type]
    with pytest.raises(dcp.CheckpointError, match="FileSystemReader is not a storage_writer"):
        dcp.save({"a": torch.ones(2)}, storage_writer=reader, no_dist=True)  # type: ignore[arg-type]
    with pytest.raises(dcp.CheckpointError, match="the class FileSystemWriter; pass an instance"):
        dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter)  # type: ignore[arg-type]


def test_text_for_a_flag_and_misspelled_names_are_refused(tmp_path: Path) -> None:
    """A text for a flag is refused by each function, since "no" would count as True."""
    state = {"a": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    manager = dcp.CheckpointManager(tmp_path / "run", no_dist=True)
    save, load, async_save = (
        partial(each, state, checkpoint_id=tmp_path / "c") for each in (dcp.save, dcp.load, dcp.async_save)
    )
    convert: Any = partial(dcp.convert, tmp_path / "c", tmp_path / "x.pt", to="torch")
    doors: dict[Any, str] = {save: "no_dist use_collectives progress", load: "no_dist weights_only progress"}
    doors |= {async_save: "no_dist overlap progress", convert: "progress overwrite"}
    doors |= {partial(manager.save, 1, state): "force last overlap"}
    for call, flags in doors.items():
        for flag in flags.split():
            with pytest.raises(dcp.errors.OptionError, match=f"^{flag} must be True or False, not (<|'no')"):
                call(**{flag: print if flag == "weights_only" else "no"})
        with pytest.raises(TypeError, match=f"'{flag}s'. Did you mean '{flag}'"):
            call(**{f"{flag}s": False})
        if call in (save, load, async_save):
            with pytest.raises(TypeError, match=r"'path'\. Did you mean 'checkpoint_id'"):
                call(path="k")
    manager.close()


def test_options_without_a_match_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Options that match no entry are warned of once; a dict in place of a value is refused."""
    dcp.save({"a": torch.ones(2), "d": 1}, checkpoint_id=tmp_path, apart="x.*", no_dist=True)
    state: dict[str, Any] = {"a": torch.zeros(2), "d": 0}
    dcp.load(state, checkpoint_id=tmp_path, rename={"^x": "", "^y": ""}, no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path, map="llama:hf-to-titan", rename={}, no_dist=True)
    expected = ["apart: no tensor matches 'x.*'", "rename={'^x': '', '^y': ''}", "map: no rule of llama"]
    assert all(map(str.startswith, caplog.messages, expected)) and len(caplog.messages) == 3
    with pytest.raises(dcp.errors.PlanError, match=r"Missing key.*'d\.n'"):
        dcp.load({"d": {"n": 0}}, checkpoint_id=tmp_path, no_dist=True)


def test_without_torch_errors_name_the_extra() -> None:
    """`dcp.save` without the extra says what to install; names that do not need torch can be used."""
    program = """
        import sys

        class NotInstalled:
            @staticmethod
            def find_spec(name, path, target=None):
                if name == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")

        sys.meta_path.insert(0, NotInstalled)
        import dcp
        assert dcp.CheckpointError and dcp.open_index and not hasattr(dcp, "no such name")
        try:
            dcp.save
        except ModuleNotFoundError as error:
            assert "pip install 'dcphub[torch]'" in str(error), error
        else:
            raise AssertionError
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def _nested(levels: int, value: float) -> dict[str, Any]:
    state: dict[str, Any] = {"t": torch.full((1,), value)}
    for _ in range(levels):
        state = {"x": state}
    return state


def test_self_referring_state_dicts_are_refused(tmp_path: Path) -> None:
    """Self-referring dicts and lists are an error that names the limit, at once, in save, async_save and
    load; 200 levels are accepted."""
    ring: dict[str, Any] = {"t": torch.ones(1)}
    ring["self"] = ring
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    dcp.save(_nested(200, 1.0), checkpoint_id=tmp_path / "c", no_dist=True)
    dcp.load(target := _nested(200, 0.0), checkpoint_id=tmp_path / "c", no_dist=True)
    assert str(target) == str(_nested(200, 1.0))
    for state in (ring, {"l": loop}, {"p": dcp.PerRank(loop)}, _nested(2000, 1.0)):
        for act in (
            lambda: dcp.save(state, checkpoint_id=tmp_path / "s", no_dist=True),  # noqa: B023
            lambda: dcp.async_save(state, checkpoint_id=tmp_path / "s", no_dist=True).result(120),  # noqa: B023
            lambda: dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True),  # noqa: B023
        ):
            with pytest.raises(dcp.errors.PlanError, match="nested deeper than 256 levels"):
                act()


def test_saves_under_torchrun_need_a_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, before ``init_process_group()``, saves are refused, because each process would save all
    of the state to one id. A load works as rank 0, with a warning. ``no_dist=True`` allows both. `dcp.read`
    gives each process the same, without a warning."""
    state = {"a": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "alone")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for refused in (
        lambda: dcp.save(state, checkpoint_id=tmp_path / "x"),
        lambda: dcp.save(state, checkpoint_id=tmp_path / "x", use_collectives=False),
        lambda: dcp.async_save(state, checkpoint_id=tmp_path / "x"),
        lambda: dcp.CheckpointManager(tmp_path / "run"),
    ):
        with pytest.raises(
            dcp.CheckpointError, match=r"one of 2 processes.*init_process_group.*no_dist=True"
        ):
            refused()
    assert not (tmp_path / "x").exists()
    with pytest.warns(UserWarning, match="loads alone, as rank 0") as record:
        dcp.load(state, checkpoint_id=tmp_path / "alone")
    assert record[0].filename == __file__
    with (
        pytest.warns(UserWarning, match="loads alone, as rank 0"),
        pytest.raises(dcp.errors.OptionError, match="is not a weight map"),
    ):
        dcp.prove(state, tmp_path / "alone", map="of nobody")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(dcp.read(tmp_path / "alone")["a"], state["a"])

    dcp.load(state, checkpoint_id=tmp_path / "alone", no_dist=True)
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    with dcp.CheckpointManager(tmp_path / "run", every_steps=1, no_dist=True) as manager:
        manager.save(1, state)
        assert manager.restore(state) is not None
    for one in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", one)
        dcp.save(state, checkpoint_id=tmp_path / "x")
