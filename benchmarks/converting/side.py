"""Run one conversion in a process of its own, with as few imports as possible."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.converting.soup import WEIGHTS
from benchmarks.machine import page_cache

_PIECE_BYTES = 16 << 20


def _sync(path: Path) -> None:
    for file in [path] if path.is_file() else page_cache.data_files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _ours(source: Path, target: Path, to: str) -> Callable[[], None]:
    if weights := WEIGHTS.get(source.name):
        from dcp.conversion.run import merge

        sources = sorted(source.iterdir())
        return lambda: print(merge(sources, target, to=to, weights=weights).seconds, file=sys.stderr)
    from dcp.conversion.run import convert

    weight_map = source.with_suffix(".json")
    options = {"map": str(weight_map)} if weight_map.exists() else {}
    return lambda: print(
        convert(source, target, to=to, files=4 if to == "dcp" else 1, **options).seconds, file=sys.stderr
    )  # type: ignore[arg-type]


def _stock(name: str, source: Path, target: Path) -> Callable[[], None]:
    if name == "consolidate_safetensors_files":
        from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

        target.mkdir()
        shards = source.parent / "shards"
        names: dict[str, int] = {}
        for file in shards.glob("*.safetensors"):
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            names |= dict.fromkeys(header.keys() - {"__metadata__"}, 1)

        def consolidate() -> None:
            consolidate_safetensors_files(str(shards), str(target), fqn_to_index_mapping=names, num_threads=2)
            _sync(target)

        return consolidate
    if name == "state dicts added":
        return lambda: _add(sorted(source.iterdir()), target)
    if name == "save_pretrained":
        from transformers import MixtralForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        def save() -> None:
            model = MixtralForCausalLM.from_pretrained(source, dtype="bfloat16")
            model.save_pretrained(target, save_original_format=False)
            _sync(target)

        return save
    from torch.distributed.checkpoint import format_utils

    function = getattr(format_utils, name)

    def convert() -> None:
        function(source, target)
        _sync(target)

    return convert


def _add(sources: Sequence[Path], target: Path) -> None:
    """Add the files one after the other to a float32 sum in memory."""
    import torch
    from safetensors.torch import load_file, save_file

    total: dict[str, torch.Tensor] = {}
    for path, weight in zip(sources, WEIGHTS["soup"], strict=True):
        for name, tensor in load_file(path).items():
            if name in total:
                total[name].add_(tensor.float(), alpha=weight)
            else:
                total[name] = tensor.float().mul_(weight)
    target.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in total.items()}, target / "model.safetensors")
    _sync(target)


def _loop(source: Path, target: Path) -> Callable[[], None]:
    files = (
        [source]
        if source.is_file()
        else [f for f in page_cache.data_files(source) if f.suffix in (".distcp", ".safetensors")]
    )

    written = set(files[:1] if source.name in WEIGHTS else files)

    def copy() -> None:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with target.open("wb", buffering=0) as out:
            for path in files:
                with path.open("rb", buffering=0) as file:
                    while count := file.readinto(buffer):
                        if path in written:
                            out.write(buffer[:count])
            os.fsync(out.fileno())

    return copy


def _main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender")
    parser.add_argument("to")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args(arguments)
    if options.contender == "ours":
        call = _ours(options.source, options.target, options.to)
    elif options.contender == "loop":
        call = _loop(options.source, options.target)
    else:
        call = _stock(options.contender, options.source, options.target)
    begun = time.perf_counter()
    call()
    print(json.dumps({"seconds": time.perf_counter() - begun}))


if __name__ == "__main__":
    _main(sys.argv[1:])
