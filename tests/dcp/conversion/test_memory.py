"""Peak memory of conversions: a few buffers, whatever the size, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dcp
from dcp.storage.formats.torch.zip_writer import ZipLayout

_PROGRAM = """
import resource, sys
from dcp.conversion.run import convert
source, target, to, source_bytes = sys.argv[1:5]
report = convert(source, target, to=to, executor="processes", workers=2)
assert report.bytes_read >= int(source_bytes)
# Not ru_maxrss, which begins with what the process had from which this one was forked.
lines = open("/proc/self/status").read().splitlines()
own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
# The larger of the two workers counts for both.
print(own + 2 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def _peak_mebibytes(source: Path, target: Path, to: str, source_bytes: int) -> float:
    command = [sys.executable, "-c", _PROGRAM, str(source), str(target), to, str(source_bytes)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout) / 1024


def _save_strided(path: Path, mebibytes: int) -> int:
    """Two tensors, one of them a transposed view in a torch.save file: read in strides."""
    rows = mebibytes << 20 >> 13
    state = {"w": torch.zeros(rows, 1024), "t": torch.zeros(1024, rows).t()}
    torch.save(state, path)
    return sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("to", [pytest.param("dcp", marks=pytest.mark.exhaustive), "safetensors"])
def test_peak_memory_is_a_few_buffers(to: str, tmp_path: Path) -> None:
    """192 MiB through two workers, half of it by strides: all processes together stay below 300 MiB."""
    size = _save_strided(tmp_path / "model.pt", 192)
    assert _peak_mebibytes(tmp_path / "model.pt", tmp_path / "copy", to, size) < 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", [False, True])
def test_peak_memory_of_a_merge(tmp_path: Path, adapter: bool) -> None:
    """Eight sources of 192 MiB through two workers; a low-rank adapter of 4,096 by 8,192."""
    rows, columns = 12288, 8192
    save_file({"m.weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}, tmp_path / "0.safetensors")
    for number in range(1, 8):
        (tmp_path / f"{number}.safetensors").hardlink_to(tmp_path / "0.safetensors")
    sources, adapters = [str(tmp_path / f"{number}.safetensors") for number in range(8)], []
    if adapter:
        folder, rank = tmp_path / "lora", 128
        folder.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        factors = {"A": torch.zeros(rank, columns), "B": torch.zeros(rows, rank)}
        named = {f"base_model.model.m.lora_{name}.weight": value for name, value in factors.items()}
        save_file(named, folder / "adapter_model.safetensors")
        sources, adapters = sources[:1], [str(folder)]
    program = _PROGRAM.replace("conversion.run import convert", "conversion.merge import merge")
    call = f"merge({sources!r}, target, to=to, adapters={adapters!r}, accumulate='float64'"
    program = program.replace("convert(source, target, to=to", call)
    command = [sys.executable, "-c", program, "", str(tmp_path / "out"), "dcp", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) / 1024 < 300


def _write_many(path: Path, count: int) -> None:
    """A safetensors file of ``count`` tensors of four elements, as a model of many experts has many."""
    names = [f"model.layers.{number // 100}.mlp.experts.{number % 100}.weight" for number in range(count)]
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * at, 16 * at + 16]}
        for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + np.ones(4 * count, "<f4").tobytes())


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_peak_memory_of_a_merge_of_many_tensors(tmp_path: Path, to: str) -> None:
    """Four sources of 50,000: the process that plans and compares stays below 300 MiB."""
    _write_many(tmp_path / "0.safetensors", 50_000)
    for number in range(1, 4):
        (tmp_path / f"{number}.safetensors").hardlink_to(tmp_path / "0.safetensors")
    sources = [str(tmp_path / f"{number}.safetensors") for number in range(4)]
    program = _PROGRAM.replace("conversion.run import convert", "conversion.merge import merge")
    program = program.replace("convert(source, target, to=to", f"merge({sources!r}, target, to=to")
    program = program.replace("own + 2 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss", "own")
    target = tmp_path / ("out" if to == "dcp" else "out.safetensors")
    command = [sys.executable, "-c", program, "", str(target), to, "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) / 1024 < 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_peak_memory_does_not_grow_with_the_model(to: str, tmp_path: Path) -> None:
    """2 GiB take no more than 300 MiB."""
    count = 4
    state = {f"t{n}": torch.zeros(1 << 27) for n in range(count)}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    target = tmp_path / ("model.pt" if to == "torch" else "copy")
    assert _peak_mebibytes(tmp_path / "source", target, to, count << 29) < 300


def test_zips_beyond_four_gibibytes(tmp_path: Path) -> None:
    """Entries and offsets that need zip64 are where torch and zipfile look for them; the file is sparse."""
    archive = ZipLayout("archive")
    archive.add("data.pkl", b"\x80\x02}.")
    archive.add("byteorder", b"little")
    sizes = [5 << 30, 1000, 3]
    offsets = archive.reserve("data", np.array(sizes), np.arange(3), np.zeros(3, np.int64)).tolist()
    archive.add("version", b"3\n")
    archive.finish()
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.truncate(archive.size_bytes)
        for at, data in zip(archive.offsets, archive.parts, strict=True):
            file.seek(at)
            file.write(data)
        for key, offset in enumerate(offsets):
            file.seek(offset)
            file.write(bytes([key + 1]))
    with zipfile.ZipFile(path) as opened:
        assert [opened.getinfo(f"archive/data/{key}").file_size for key in range(3)] == sizes
    reader = torch._C.PyTorchFileReader(str(path))
    for key, offset in enumerate(offsets):
        assert offset % 64 == 0
        assert reader.get_record_offset(f"data/{key}") == offset  # type: ignore[attr-defined]
    assert reader.get_record("version") == b"3\n"
