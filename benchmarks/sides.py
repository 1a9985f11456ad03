"""The two contenders behind one pair of functions each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp

__all__ = ["OURS", "SAVERS", "STOCK", "Side"]


@dataclass(frozen=True)
class Side:
    """``save(state_dict, folder, durable)`` and ``load(state_dict, folder)``, called alike on all ranks."""

    name: str
    save: Callable[[dict[str, Any], Path, bool], None]
    load: Callable[[dict[str, Any], Path], None]


def _save_ours(state_dict: dict[str, Any], folder: Path, durable: bool) -> None:
    dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(folder, sync_files=durable))


def _load_ours(state_dict: dict[str, Any], folder: Path) -> None:
    report = dcp.load(state_dict, storage_reader=dcp.FileSystemReader(folder, verify="blocks"))
    if report.missing:
        raise RuntimeError(f"{folder} lacks {report.missing[:3]}")


def _stock_saver(threads: int) -> Callable[[dict[str, Any], Path, bool], None]:
    def save(state_dict: dict[str, Any], folder: Path, durable: bool) -> None:
        writer = stock.FileSystemWriter(folder, sync_files=durable, thread_count=threads)
        stock.save(state_dict, storage_writer=writer, no_dist=not dist.is_initialized())

    return save


def _load_stock(state_dict: dict[str, Any], folder: Path) -> None:
    reader = stock.FileSystemReader(folder)
    stock.load(state_dict, storage_reader=reader, no_dist=not dist.is_initialized())


OURS = Side("ours", _save_ours, _load_ours)
STOCK = Side("stock", _stock_saver(1), _load_stock)
SAVERS = {"ours": OURS.save, "stock": STOCK.save, "stock_2_threads": _stock_saver(2)}
"""torch's FileSystemWriter has thread_count=1 by default; 2 is all that two cores can use."""

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
