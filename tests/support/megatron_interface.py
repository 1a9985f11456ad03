"""Stand-in for the checkpoint strategies of Megatron-Core 0.19.

`install` makes the module importable as Megatron's, or uses the installed package; in both cases the queue of
saves runs on the CPU.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as stock

__all__ = ["PACKAGE", "Interface", "install"]

Interface = Literal["stand-in", "installed"]
PACKAGE = "megatron.core.dist_checkpointing"


@dataclass
class _Tensor:
    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    @classmethod
    def from_rank_offsets(
        cls, key: str, data: torch.Tensor, *offsets: Any, prepend_axis_num: int = 0, **options: Any
    ) -> _Tensor:
        shape, begin = [1] * prepend_axis_num + list(data.shape), [0] * (prepend_axis_num + data.ndim)
        for axis, number, parts in offsets:
            begin[axis] = number * shape[axis]
            shape[axis] *= parts
        places = tuple(data.shape), tuple(shape), tuple(begin)
        return cls(key, data, data.dtype, *places, prepend_axis_num=prepend_axis_num, **options)

    def init_data(self, device: str) -> None:
        if self.data is None:
            self.data = torch.empty(self.local_shape, dtype=self.dtype, device=device)


@dataclass
class _Object:
    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0

    @property
    def unique_key(self) -> str:
        numbers = (".".join(map(str, each)) for each in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{'_'.join(numbers)}"


class _Strategy:
    def __init__(self, **options: Any) -> None:
        self.backend, self.version = "torch_dist", 1


class _SaveStrategy(_Strategy):
    def save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "") -> Any:
        raise AssertionError("not through dcp")

    async_save = save


class _LoadStrategy(_Strategy):
    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "") -> Any:
        raise AssertionError("not through dcp")


class _Request(NamedTuple):
    async_fn: Callable[..., None]
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], None]]


class _Queue:
    """A forked process for each request; requests are finalized after the end of all ranks' processes."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, _Request]] = []

    def schedule_async_request(self, request: _Request) -> None:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=request.async_fn, args=request.async_fn_args)
        process.start()
        self._calls.append((process, request))

    def maybe_finalize_async_calls(self, blocking: bool = False) -> None:
        while self._calls:
            process, request = self._calls[0]
            alive = torch.tensor(int(process.is_alive()))
            dist.all_reduce(alive)
            if alive and not blocking:
                return
            process.join()
            del self._calls[0]
            for function in request.finalize_fns:
                function()


def _values(nested: Any) -> Iterator[Any]:
    for value in nested.values() if isinstance(nested, dict) else nested:
        if isinstance(value, dict | list):
            yield from _values(value)
        else:
            yield value


def _mapped(function: Any, nested: Any) -> Any:
    if isinstance(nested, dict):
        return {key: _mapped(function, value) for key, value in nested.items()}
    return [_mapped(function, value) for value in nested] if isinstance(nested, list) else function(nested)


def _is_main(replica_id: Any) -> bool:
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    sharded = {k: v for k, v in state.items() if isinstance(next(_values([v]), None), _Tensor | _Object)}
    return sharded, {k: v for k, v in state.items() if k not in sharded}


def _save(
    state: dict[str, Any],
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    async_sharded_save: bool = False,
    async_strategy: str = "nvrx",
) -> Any:
    sharded, common = _split(state)
    sharded["common_state"] = _Object("common_state", common, (1,), (0,), dist.get_rank())
    strategy = sharded_strategy or _SaveStrategy()

    def finalize() -> None:
        if dist.get_rank() == 0:
            (Path(checkpoint_dir) / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        dist.barrier()

    if async_sharded_save:
        request = strategy.async_save(sharded, checkpoint_dir, async_strategy)
        request.finalize_fns.append(finalize)
        return request
    strategy.save(sharded, checkpoint_dir)
    return finalize()


def _load(state: dict[str, Any], checkpoint_dir: str, sharded_strategy: Any = None) -> dict[str, Any]:
    assert (Path(checkpoint_dir) / "metadata.json").exists()
    sharded, own = _split(state)
    name = "common_state/shard_0_1"
    common: dict[str, Any] = {name: io.BytesIO()}
    stock.load(common, storage_reader=stock.FileSystemReader(checkpoint_dir), no_dist=True)
    strategy = sharded_strategy or _LoadStrategy()
    return {**common[name][0], **own, **strategy.load(sharded, checkpoint_dir, "mcore")}


def _get_async_strategy(async_strategy: str, module: str) -> tuple[str, Any]:
    return async_strategy, {"AsyncRequest": _Request, "AsyncCallsQueue": _Queue}[module]


_MODULES: dict[str, dict[str, Any]] = {
    "": {"ShardedTensor": _Tensor, "ShardedObject": _Object, "save": _save, "load": _load},
    ".dict_utils": {"nested_values": _values, "dict_list_map_outplace": _mapped},
    ".mapping": {"is_main_replica": _is_main},
    ".strategies": {},
    ".strategies.torch": {
        "TorchDistSaveShardedStrategy": _SaveStrategy,
        "TorchDistLoadShardedStrategy": _LoadStrategy,
        "get_async_strategy": _get_async_strategy,
    },
    ".utils": {"force_all_tensors_to_non_fp8": lambda state: None},
}


def install(interface: Interface) -> None:
    """Make the module importable, in a process of its own, and import the plug-in before ranks are forked."""
    if interface == "installed":
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    else:
        _install_stand_in()
    import_module("dcp.integrations.megatron")


def _install_stand_in() -> None:
    torch.serialization.add_safe_globals([Namespace])
    for package in ("megatron", "megatron.core"):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    for name, contents in _MODULES.items():
        module = sys.modules[PACKAGE + name] = ModuleType(PACKAGE + name)
        module.__path__ = []
        vars(module).update(contents)
