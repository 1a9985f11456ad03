"""``dcp``, ``dcp ls`` and ``dcp show``: what is printed, as text and as JSON, and the exit status."""

import io
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
from safetensors.torch import save_file

import dcp
from dcp.cli.app import app
from dcp.cli.common import describe_bytes, describe_time, print_json
from dcp.inspection.checkpoints import list_checkpoints
from dcp.inspection.entries import module_tree, tensor_rows
from dcp.storage.stores import open_store
from tests.dcp.cli_support import data_file, run, save_ours, save_stock
from tests.support.programs import Program


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours."""
    return save_ours(tmp_path_factory.mktemp("run") / "step-00000012")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of stock torch."""
    return save_stock(tmp_path_factory.mktemp("run") / "step-00000013")


def test_ls_lists_a_folder_by_step_with_the_state_of_each(tmp_path: Path) -> None:
    """Committed, incomplete and unreadable checkpoints are told apart; other folders are left out."""
    save_ours(tmp_path / "step-10")
    save_stock(tmp_path / "step-9")
    save_ours(tmp_path / "step-2")
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
    assert "step-11: " in listed.err
    assert listed.status == 0


def test_ls_json_has_the_facts_as_numbers(tmp_path: Path) -> None:
    """Sizes are bytes, times are seconds since the epoch, what is not known is null."""
    before = time.time()
    folder = save_ours(tmp_path / "a-000100")
    save_stock(tmp_path / "b")
    own, foreign = sorted(run("ls", tmp_path, "--json").json, key=lambda row: str(row["name"]))
    assert own["state"] == "committed"
    assert own["step"] == 100
    assert own["tensors"] == 5
    assert own["world_size"] == 1
    assert own["format"] == "dcp"
    assert own["bytes"] == data_file(folder).stat().st_size
    assert before - 1 <= own["committed_seconds"] <= time.time()
    assert own["url"] == str(folder)
    assert foreign["format"] == "torch_dcp"
    assert foreign["step"] is None
    assert foreign["world_size"] is None


def test_ls_quick_opens_nothing(tmp_path: Path) -> None:
    """Committed or not, time and size are by the listing alone: what cannot be read is not noticed."""
    folder = save_ours(tmp_path / "step-3")
    (folder / "manifest.msgpack").write_bytes(b"not a manifest")
    save_stock(tmp_path / "step-4")
    (tmp_path / "step-4" / ".metadata").unlink()
    rows = run("ls", "--quick", tmp_path, "--json").json
    assert [(row["step"], row["state"], row["format"], row["tensors"]) for row in rows] == [
        (3, "committed", None, None),
        (4, "incomplete", None, None),
    ]
    assert rows[0]["bytes"] == data_file(folder).stat().st_size
    newest = max((folder / name).stat().st_mtime for name in ("manifest.msgpack", ".metadata"))
    assert rows[0]["committed_seconds"] == newest


def test_ls_of_a_checkpoint_is_one_row(ours: Path) -> None:
    """A checkpoint itself is listed, not searched for others."""
    (row,) = run("ls", ours, "--json").json
    assert row["name"] == ours.name
    assert row["step"] == 12


def test_ls_lists_weights_without_a_commit(tmp_path: Path) -> None:
    """Whatever can be loaded and converted: single files, a folder of shards, weights beside checkpoints; not
    what only has such a name, and of files that cannot be read the reason."""
    root = tmp_path / "trained"
    save_ours(root / "step-9")
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
    assert rows["model-7.pt"]["url"] == str(root / "model-7.pt")
    (alone,) = run("ls", root / "model-7.pt", "--json").json
    assert alone == rows["model-7.pt"]
    quick = {row["name"]: row["state"] for row in run("ls", "--quick", root, "--json").json}
    assert quick["model-7.pt"] == quick["hf-8"] == quick[root.name] == "unopened"


def test_ls_shows_files_of_several_models_one_by_one(tmp_path: Path) -> None:
    """Where a folder's files do not make one set of weights, each is listed, and why not together."""
    for step in (1, 2):
        save_file({"w": torch.full((step,), 1.0)}, tmp_path / f"epoch-{step}.safetensors")
    rows = {row["name"]: row["state"] for row in run("ls", tmp_path, "--json").json}
    assert rows == {
        tmp_path.name: "unreadable",
        "epoch-1.safetensors": "complete",
        "epoch-2.safetensors": "complete",
    }


def test_weights_behind_a_url_are_listed() -> None:
    """Those that begin as weights do, and one alone by its own URL."""
    store = open_store("memory://listing-of-weights")
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    for step in range(3):
        store.publish(f"model-{step}.pt", buffer.getvalue(), durable=False)
    store.publish("tokens.bin", b"no weights", durable=False)
    rows = list_checkpoints(store.url)
    assert [(row.step, row.state, row.tensors) for row in rows] == [(n, "complete", 1) for n in range(3)]
    assert list_checkpoints(f"{store.url}/model-1.pt") == rows[1:2]


def test_ls_of_nothing_says_so(tmp_path: Path) -> None:
    """An empty folder is not an error; a folder that is not there is one, with status 3."""
    empty = run("ls", tmp_path)
    assert (empty.status, empty.out) == (0, "")
    assert "no checkpoints" in empty.err
    assert run("ls", tmp_path, "--json").json == []
    absent = run("ls", tmp_path / "absent")
    assert (absent.status, absent.out) == (3, "")
    assert absent.err == f"dcp: {tmp_path / 'absent'} holds no checkpoint: it does not exist.\n"


def test_show_prints_provenance_and_tensors(ours: Path) -> None:
    """The header says what wrote the checkpoint; the table has a row for each tensor."""
    shown = run("show", ours)
    assert shown.status == 0
    header, _, table = shown.out.partition("\n\n")
    facts = {line[:10].strip(): line[12:] for line in header.splitlines()}
    assert facts["checkpoint"] == str(ours)
    assert facts["format"] == "dcp"
    assert facts["ranks"] == "1"
    assert f"torch {torch.__version__}" in facts["written by"]
    assert facts["save id"] in data_file(ours).name
    assert [phase.split()[0] for phase in facts["seconds"].split(", ")][-1] == "write"
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["tensor"] == ["dtype", "shape", "chunks", "size", "files"]
    assert rows["model.embed"] == ["float32", "300x70", "1", "82.0", "KiB", "1"]
    assert rows["model.scale"] == ["bfloat16", "scalar", "1", "2", "B", "1"]
    assert rows["model.empty"][:2] == ["float32", "0x3"]


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_show_json_has_tensors_and_objects(kind: str, request: pytest.FixtureRequest) -> None:
    """Both formats show the same tensors and the same values; what JSON cannot say is shown as its repr."""
    shown = run("show", request.getfixturevalue(kind), "--objects", "--json").json
    tensors = {row["fqn"]: row for row in shown["tensors"]}
    assert tensors["model.layers.0.w"]["shape"] == [8, 8]
    assert tensors["model.layers.0.w"]["bytes"] == 256
    assert len(tensors["model.layers.0.w"]["files"]) == 1
    objects = {row["fqn"]: row for row in shown["objects"]}
    assert objects["step"]["value"] == 7
    assert objects["lr"]["value"] == [0.1, [1, 2]]
    assert objects["schedule.warmup"]["value"] == "inf"
    assert objects["device"]["is_plain"] is False
    assert objects["device"]["value"] is None
    assert shown["checkpoint"]["tensors"] == 5
    assert shown["checkpoint"]["objects"] == len(objects)
    assert [set(phases) >= {"local_plan", "write"} for phases in shown["checkpoint"]["rank_seconds"]] == (
        [True] if kind == "ours" else []
    )


def test_show_objects_prints_values_and_their_types(ours: Path) -> None:
    """Plain values are printed as Python writes them, others by where they are."""
    lines = run("show", ours, "--objects").out.splitlines()
    assert any(line.split() == ["step", "int", "7"] for line in lines)
    assert any(line.startswith("lr ") and line.endswith("[0.1, (1, 2)]") for line in lines)
    assert any(line.startswith("device ") and "pickled" in line for line in lines)


def test_show_tree_sums_by_module(ours: Path) -> None:
    """Every module has the number, elements and bytes of the tensors below it."""
    tree = run("show", ours, "--tree", "--json").json["modules"]
    (model,) = tree["children"]
    assert (model["name"], model["tensors"]) == ("model", 5)
    assert model["elements"] == 300 * 70 + 64 + 64 + 0 + 1
    layers = next(child for child in model["children"] if child["name"] == "layers")
    assert (layers["tensors"], layers["bytes"]) == (2, 512)
    lines = [line.split() for line in run("show", ours, "--tree").out.splitlines()]
    assert ["layers", "2", "128", "512", "B", "▎"] in lines
    (all_of_it,) = [line for line in lines if line[:2] == ["model", "5"]]
    assert all_of_it[-1] == 24 * "█"
    assert ["total", "5", "21,129", "82.5", "KiB"] in lines


def test_show_of_what_is_not_committed_fails_with_one_line(tmp_path: Path) -> None:
    """Data files without a manifest are no checkpoint: status 3, and the message says what is missing."""
    folder = save_ours(tmp_path / "x")
    (folder / "manifest.msgpack").unlink()
    (folder / ".metadata").unlink()
    failed = run("show", folder)
    assert (failed.status, failed.out) == (3, "")
    assert failed.err.count("\n") == 1
    assert "no committed checkpoint" in failed.err
    assert "Traceback" in run("show", folder, "--debug").err


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    """Control characters in names and values come from files, and are printed escaped."""
    folder = save_ours(tmp_path / "x", {"a\x1b[31m": torch.ones(2), "b\r\n": "\x1b]0;owned\x07"})
    shown = run("show", folder, "--objects", "--tree")
    assert "\x1b" not in shown.out
    assert "\r" not in shown.out
    assert "a\\x1b[31m" in shown.out


@pytest.mark.parametrize(
    "arguments", [["ls"], ["frobnicate"], ["show", ".", "--nonsense"], ["verify"], ["show", "a", "b"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    """A mistake on the command line is told apart from a failure."""
    wrong = run(*arguments)
    assert wrong.status == 2
    assert "Usage: dcp" in wrong.err
    assert "Traceback" not in wrong.err


@pytest.mark.parametrize("arguments", [["--help"], ["map", "--help"], ["convert", "--help"]])
def test_help_is_as_if_all_commands_were_made(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands and options that a call does not need are left out of the making, not of what is printed."""
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app)(args=arguments, prog_name="dcp")
    assert ended.value.code == 0
    assert run(*arguments).out == capsys.readouterr().out


def test_a_scheme_without_a_store_fails_clearly() -> None:
    """An address that no store serves is a failure with one line, not a look into a folder of that name."""
    failed = run("ls", "gopher://host/x")
    assert failed.status == 3
    assert "gopher" in failed.err
    assert failed.err.count("\n") == 1


def test_the_command_starts_without_torch(ours: Path) -> None:
    """``python -m dcp`` lists, shows and verifies in an interpreter in which torch cannot be imported."""
    program = (
        "import runpy, sys; sys.modules['torch'] = None; folder = sys.argv[1]\n"
        "for command in (['ls'], ['show', '--objects'], ['verify']):\n"
        "    sys.argv = ['dcp', *command, folder]\n"
        "    try:\n"
        "        runpy.run_module('dcp', run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, command\n"
        "    print('END')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ours)],
        cwd=Path(dcp.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [ours.name in printed for printed in done.stdout.split("END\n")] == [True] * 3 + [False]


def test_installed_command_and_module_are_the_same() -> None:
    """``dcp`` as installed and ``python -m dcp`` print the version; usage goes to standard error."""
    root = Path(dcp.__file__).parents[1]
    installed = Path(sys.executable).parent / "dcp"
    for command in ([str(installed)], [sys.executable, "-m", "dcp"]):
        done = subprocess.run([*command, "--version"], cwd=root, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{dcp.version.__version__}\n")


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    """``dcp show ... | head`` ends without a traceback when head has seen enough."""
    many = {f"layer{number}.w": torch.ones(1) for number in range(3000)}
    folder = save_ours(tmp_path / "x", many)
    read, write = os.pipe()
    with Program("-m", "dcp", "show", folder, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        os.close(read)
        _, errors = process.communicate()
    assert (errors, process.returncode) == ("", 0)


def test_listing_twenty_thousand_tensors_takes_no_second(tmp_path: Path) -> None:
    """The table of a large checkpoint is made in time that grows with its rows, and slowly."""
    folder = save_ours(tmp_path / "x", {f"layers.{n // 8}.w{n % 8}": torch.ones(1) for n in range(20_000)})
    index = dcp.open_index(folder)
    begun = time.process_time()
    rows = tensor_rows(index)
    root = module_tree(rows)
    assert time.process_time() - begun < 1.0
    assert root.tensors == len(rows) == 20_000
    assert root.bytes == int(np.sum(index.payload_lengths)) == 80_000
    assert len(run("show", folder).out.splitlines()) > 20_000


def test_list_checkpoints_takes_file_urls(ours: Path) -> None:
    """A file:// address is the path it names."""
    (summary,) = list_checkpoints(ours.as_uri())
    assert summary.name == ours.name


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10_240, "10.0 KiB"),
        (1024 * 1000, "0.98 MiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_sizes_have_three_digits_and_a_binary_unit(count: int | None, text: str) -> None:
    """Sizes are short, and honest about the unit."""
    assert describe_bytes(count) == text


def test_times_are_local_and_sortable() -> None:
    """Times are shown in the reader's zone, year first."""
    assert describe_time(None) == "-"
    assert describe_time(0.0) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    for odd in (float("nan"), float("inf"), 1e14):  # a memory file system keeps the last one for a file
        assert describe_time(odd) == "-"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_of_any_name(encoding: str) -> None:
    """Halves of surrogate pairs, and what a terminal has no letters for, are escaped."""
    document = {"\ud800": "\u00e9"}
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with redirect_stdout(shown):
        print_json(document)
    shown.seek(0)
    assert json.loads(shown.read()) == document
