"""``dcp``, ``dcp ls`` and ``dcp show``: output as text and as JSON, and the exit status."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp
from tests.command_line.cli_support import data_file, run, save_dcp, save_stock
from tests.support.programs import Program, run_program

ROOT = Path(dcp.__file__).parents[1]


@pytest.fixture(scope="module")
def by_dcp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with dcp."""
    return save_dcp(tmp_path_factory.mktemp("run") / "step-00000012")


@pytest.fixture(scope="module")
def by_stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with stock torch."""
    return save_stock(tmp_path_factory.mktemp("run") / "step-00000013")


def test_ls_lists_a_folder_by_step_with_the_state_of_each(tmp_path: Path) -> None:
    """Committed, incomplete and unreadable checkpoints are listed with a state; other folders are not."""
    save_dcp(tmp_path / "step-10")
    save_stock(tmp_path / "step-9")
    save_dcp(tmp_path / "step-2")
    for name in ("manifest.msgpack", ".metadata"):
        (tmp_path / "step-2" / name).unlink()
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-11" / "manifest.msgpack").write_bytes(b"not a manifest")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("nothing here")
    listed = run("ls", tmp_path)
    summary, _, table = listed.out.partition("\n\n")
    assert summary.startswith(f"{tmp_path}: 4 checkpoints, 1 incomplete, 1 unreadable, ")
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["name", "step", "committed", "format", "tensors", "size", "ranks", "state"]
    assert [(line[0], line[1], line[-1]) for line in lines[1:]] == [
        ("step-2", "2", "incomplete"),
        ("step-9", "9", "committed"),
        ("step-10", "10", "committed"),
        ("step-11", "11", "unreadable"),
    ]
    assert (listed.status, "step-11: " in listed.err) == (0, True)


def test_ls_shows_metrics(tmp_path: Path) -> None:
    """The table has a column of metrics if a checkpoint has some, and the JSON has them for each."""
    for step, metrics in (("step-1", {"loss": 0.25, "lr": 3e-4}), ("step-2", {"loss": float("nan")})):
        state = {"w": torch.ones(3)}
        dcp.save(state, checkpoint_id=tmp_path / step, no_dist=True, user_metadata={"metrics": metrics})
    save_dcp(tmp_path / "step-3")
    header, *lines = run("ls", tmp_path).out.splitlines()[2:]
    assert header.split()[-2:] == ["state", "metrics"]
    shown = [line.partition("  committed  ")[2] for line in lines]
    assert shown == ["loss=0.25 lr=0.0003", "loss=nan", "-"]
    rows = run("ls", tmp_path, "--json").json
    assert [row["metrics"] for row in rows] == [{"loss": 0.25, "lr": 3e-4}, {"loss": "nan"}, {}]


def test_ls_json_has_numbers(tmp_path: Path) -> None:
    """Sizes are bytes, times are seconds since the epoch, unknown values are null."""
    before = time.time()
    folder = save_dcp(tmp_path / "a-000100")
    save_stock(tmp_path / "b")
    own, foreign = sorted(run("ls", tmp_path, "--json").json, key=lambda row: str(row["name"]))
    facts = {"state": "committed", "step": 100, "tensors": 5, "world_size": 1, "format": "dcp"}
    assert {name: own[name] for name in facts} == facts
    assert (own["bytes"], own["url"]) == (data_file(folder).stat().st_size, str(folder))
    assert before - 1 <= own["committed_seconds"] <= time.time()
    assert (foreign["format"], foreign["step"], foreign["world_size"]) == ("torch_dcp", None, None)
    (alone,) = run("ls", folder, "--json").json
    assert alone == own
    assert run("ls", folder.as_uri(), "--json").json[0]["name"] == own["name"]


def test_ls_lists_weights_without_a_commit(tmp_path: Path) -> None:
    """Weights files and folders of shards are listed beside checkpoints; a similar name is not enough."""
    root = tmp_path / "trained"
    save_dcp(root / "step-9")
    torch.save({"w": torch.ones(3), "b": torch.ones(2)}, root / "model-7.pt")
    torch.save(Path, root / "args.bin")
    (root / "tokens.bin").write_bytes(b"no weights")
    (root / "hf-8").mkdir()
    save_file({"w": torch.ones(3)}, root / "hf-8" / "model.safetensors")
    torch.save({"state": {}}, root / "hf-8" / "optimizer.pt")
    save_file({"v": torch.ones(5)}, root / "model.safetensors")
    rows = {row["name"]: row for row in run("ls", root, "--json").json}
    facts = ("step", "state", "format", "tensors")
    assert {name: tuple(row[fact] for fact in facts) for name, row in rows.items()} == {
        root.name: (None, "complete", "safetensors", 1),
        "args.bin": (None, "unreadable", None, None),
        "hf-8": (8, "complete", "safetensors", 1),
        "model-7.pt": (7, "complete", "torch_save", 2),
        "step-9": (9, "committed", "dcp", 5),
    }
    assert rows["model-7.pt"]["bytes"] == (root / "model-7.pt").stat().st_size
    assert run("ls", root / "model-7.pt", "--json").json == [rows["model-7.pt"]]
    for name in ("a", "b"):  # two exports of one model are not a checkpoint
        save_file({"w": torch.ones(3)}, root / f"{name}.safetensors")
    (root / "model.safetensors").unlink()
    files = {row["name"]: row["state"] for row in run("ls", root, "--json").json}
    assert root.name not in files and files["a.safetensors"] == files["b.safetensors"] == "complete"
    quick = {row["name"]: row["state"] for row in run("ls", "--quick", root, "--json").json}
    assert quick["model-7.pt"] == quick["hf-8"] == quick[root.name] == "unopened"


def test_ls_of_empty_and_missing_folders(tmp_path: Path) -> None:
    """An empty folder is not an error; a missing folder or store is an error with status 3."""
    empty = run("ls", tmp_path)
    assert (empty.status, empty.out) == (0, "")
    assert "no checkpoints" in empty.err
    assert run("ls", tmp_path, "--json").json == []
    absent = run("ls", tmp_path / "absent")
    assert (absent.status, absent.out) == (3, "")
    assert absent.err == f"dcp: {tmp_path / 'absent'} holds no checkpoint: it does not exist.\n"
    failed = run("ls", "gopher://host/x")
    assert (failed.status, failed.err.count("\n"), "gopher" in failed.err) == (3, 1, True)


def test_show_prints_provenance_and_tensors(by_dcp: Path) -> None:
    """The header names the writer of the checkpoint; the table has a row for each tensor."""
    shown = run("show", by_dcp)
    assert shown.status == 0
    header, _, table = shown.out.partition("\n\n")
    facts = {line[:10].strip(): line[12:] for line in header.splitlines()}
    assert (facts["checkpoint"], facts["format"], facts["ranks"]) == (str(by_dcp), "dcp", "1")
    assert f"torch {torch.__version__}" in facts["written by"]
    assert facts["save id"] in data_file(by_dcp).name
    assert [phase.split()[0] for phase in facts["seconds"].split(", ")][-1] == "write"
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["tensor"] == ["dtype", "shape", "chunks", "size", "files"]
    assert rows["model.embed"] == ["float32", "300x70", "1", "82.0", "KiB", "1"]
    assert rows["model.scale"] == ["bfloat16", "scalar", "1", "2", "B", "1"]
    assert rows["model.empty"][:2] == ["float32", "0x3"]


@pytest.mark.parametrize("kind", ["by_dcp", "by_stock"])
def test_show_json_has_tensors_and_objects(kind: str, request: pytest.FixtureRequest) -> None:
    """Both formats show the same tensors and values. Values without a JSON form are shown as their repr."""
    shown = run("show", request.getfixturevalue(kind), "--objects", "--json").json
    tensors = {row["fqn"]: row for row in shown["tensors"]}
    layer = tensors["model.layers.0.w"]
    assert (layer["shape"], layer["bytes"], len(layer["files"])) == ([8, 8], 256, 1)
    objects = {row["fqn"]: row for row in shown["objects"]}
    values = {"step": 7, "lr": [0.1, [1, 2]], "schedule.warmup": "inf", "device": None}
    assert {name: objects[name]["value"] for name in values} == values
    assert objects["device"]["is_plain"] is False
    assert (shown["checkpoint"]["tensors"], shown["checkpoint"]["objects"]) == (5, len(objects))
    phases = [set(phases) >= {"local_plan", "write"} for phases in shown["checkpoint"]["rank_seconds"]]
    assert phases == ([True] if kind == "by_dcp" else [])


def test_show_tree_sums_by_module(by_dcp: Path) -> None:
    """Each module has the number, elements and bytes of the tensors below."""
    tree = run("show", by_dcp, "--tree", "--json").json["modules"]
    (model,) = tree["children"]
    elements = 300 * 70 + 64 + 64 + 0 + 1
    assert (model["name"], model["tensors"], model["elements"]) == ("model", 5, elements)
    layers = next(child for child in model["children"] if child["name"] == "layers")
    assert (layers["tensors"], layers["bytes"]) == (2, 512)
    lines = [line.split() for line in run("show", by_dcp, "--tree").out.splitlines()]
    assert ["layers", "2", "128", "512", "B", "▎"] in lines
    (all_of_it,) = [line for line in lines if line[:2] == ["model", "5"]]
    assert all_of_it[-1] == 24 * "█"
    assert ["total", "5", "21,129", "82.5", "KiB"] in lines


def test_show_of_uncommitted_data_fails_in_one_line(tmp_path: Path) -> None:
    """Data files without a manifest are not a checkpoint: status 3, and the missing file in the message."""
    folder = save_dcp(tmp_path / "x")
    one_file = run("verify", data_file(folder))
    assert one_file.status == 3 and f"data file of a checkpoint: pass its folder, {folder}\n" in one_file.err
    for name in ("manifest.msgpack", ".metadata"):
        (folder / name).unlink()
    failed = run("show", folder)
    assert (failed.status, failed.out, failed.err.count("\n")) == (3, "", 1)
    assert "no committed checkpoint" in failed.err
    assert "Traceback" in run("show", folder, "--debug").err


def test_files_of_other_tools_are_shown(tmp_path: Path) -> None:
    """show takes a file or folder of weights; a file of an old torch is named as such."""
    torch.save({"layer": {"w": torch.ones(2, 3)}, "lr": 0.5}, tmp_path / "m.pt")
    shown = run("show", tmp_path / "m.pt", "--objects", "--json").json
    assert shown["checkpoint"]["format"] == "torch_save" and shown["checkpoint"]["url"].endswith("m.pt")
    assert [row["fqn"] for row in shown["tensors"]] == ["layer.w"]
    assert shown["objects"][0]["value"] == 0.5
    buffer = io.BytesIO()
    torch.save(torch.ones(1), buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "old.pt").write_bytes(buffer.getvalue())
    assert "before 1.6" in run("show", tmp_path / "old.pt").err
    assert run("show", tmp_path / "absent.pt").status == 3


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    """Control characters in names and values of a file are printed escaped."""
    folder = save_dcp(tmp_path / "x", {"a\x1b[31m": torch.ones(2), "b\r\n": "\x1b]0;owned\x07"})
    for command in (("show", folder, "--objects", "--tree"), ("stats", folder), ("cat", folder, "b\r\n")):
        printed = run(*command).out
        assert "\x1b" not in printed and "\r" not in printed
    assert "a\\x1b[31m" in run("show", folder).out


@pytest.mark.parametrize(
    "arguments", [["ls"], ["frobnicate"], ["show", ".", "--nonsense"], ["verify"], ["show", "a", "b"]]
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    """A usage error has another status than a failure."""
    wrong = run(*arguments)
    assert wrong.status == 2
    assert "Usage: dcp" in wrong.err and "Traceback" not in wrong.err


def test_every_command_of_the_help_has_a_help() -> None:
    """Each command of the list has a help page with options."""
    listed = run("--help").out.partition("Look:")[2]
    commands = re.findall(r"^  ([a-z][a-z-]*)  ", listed, re.MULTILINE)
    assert {"ls", "show", "cat", "verify", "convert", "map", "gc", "serve", "demo", "watch"} <= {*commands}
    for command in commands:
        page = run(command, "--help")
        assert page.status == 0 and f"Usage: dcp {command}" in page.out and "--help" in page.out


WITHOUT = """
import runpy, sys
sys.modules['torch'] = None
for arguments in ({commands}):
    sys.argv = ['dcp', *arguments.split()]
    try:
        runpy.run_module('dcp', run_name='__main__')
    except SystemExit as end:
        assert not end.code, arguments
    print('END')
"""


def test_commands_work_without_torch(by_dcp: Path, by_stock: Path) -> None:
    """Commands that inspect, compare, verify and list removals work where torch cannot be imported."""
    commands = [f"{command} {by_dcp}" for command in ("ls", "show --objects", "verify", "stats", "rm", "gc")]
    commands += [f"cat {by_dcp} model.embed", f"diff {by_dcp} {by_stock}", f"digest {by_stock}"]
    program = WITHOUT.format(commands=", ".join(map(repr, commands)))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("END\n") == len(commands)


def test_the_commands_start_without_numpy_and_rich() -> None:
    """Help and usage errors do not import numpy and rich."""
    program = (
        "import sys, dcp.cli.app\n"
        "heavy = {'numpy', 'torch', 'msgpack', 'isal', 'fsspec', 'rich.progress'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installed_command_and_module_are_the_same() -> None:
    """The installed ``dcp`` and ``python -m dcp`` print the same version."""
    installed = Path(sys.executable).parent / "dcp"
    for command in ([str(installed)], [sys.executable, "-m", "dcp"]):
        done = subprocess.run([*command, "--version"], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{dcp.version.__version__}\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["serve"], "pydantic_settings"),
        (["worker"], "structlog"),
        (["db", "upgrade"], "alembic"),
        (["keys", "list"], "sqlalchemy"),
    ],
)
def test_errors_for_missing_packages_name_the_extra(
    arguments: list[str], package: str, tmp_path: Path
) -> None:
    """The error for a missing package says in one line which extra to install."""
    without = f"import runpy, sys; sys.modules[{package!r}] = None; "
    program = without + "runpy.run_module('dcp', run_name='__main__')"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr == f"dcp: this command needs {package}: pip install 'dcphub[server]'\n"


@pytest.mark.parametrize("command", ["show", "stats"])
def test_a_closed_pipe_is_no_failure(tmp_path: Path, command: str) -> None:
    """``dcp show | head`` has status 0 and an empty standard error, with a full or closed pipe."""
    folder = save_dcp(tmp_path / "x", {f"layer{number}.w": torch.ones(1) for number in range(3000)})
    pipe = subprocess.PIPE
    with Program("-m", "dcp", command, folder, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        assert command == "stats" or process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize("command", ["stats", "verify", "save", "load"])
def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(tmp_path: Path, command: str) -> None:
    """A terminal gets a progress bar with rate and time left; logs and pipes get none."""
    folder = save_dcp(tmp_path / "x", {"w": torch.zeros(5 << 20)})
    call = f"import sys, torch, dcp; dcp.{command}({{'w': torch.zeros(5 << 20)}}, checkpoint_id=sys.argv[1]"
    program = ["-c", f"{call}, progress=True)"] if command in ("save", "load") else ["-m", "dcp", command]
    arguments = [*program, str(folder)]
    wide = {**os.environ, "COLUMNS": "400"}  # room for a bar beside a long path
    piped = run_program(*arguments, env=wide)
    assert (piped.returncode, piped.stderr) == (0, "")
    controller, terminal = os.openpty()
    with Program(*arguments, stdout=subprocess.PIPE, stderr=terminal, env=wide) as process:
        os.close(terminal)
        drawn = b""
        try:
            while piece := os.read(controller, 4096):
                drawn += piece
        except OSError:  # Linux's error if the other end of the terminal is closed
            pass
        out, _ = process.communicate()
    os.close(controller)
    assert out == piped.stdout
    assert "━" in drawn.decode()
