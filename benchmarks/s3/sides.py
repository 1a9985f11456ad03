"""Contenders on an object store: dcphub, stock torch with s3fs, and Amazon's storage classes for torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import dcp
from benchmarks.s3.service import S3Service

__all__ = ["ObjectSide", "connector_side", "ours", "stock_side"]


@dataclass(frozen=True)
class ObjectSide:
    """``save(state_dict, url)``, and ``load(state_dict, url)``, which returns the fetched bytes if known."""

    name: str
    save: Callable[[dict[str, Any], str], None]
    load: Callable[[dict[str, Any], str], int | None]


def ours() -> ObjectSide:
    """Return `dcp.save` and `dcp.load` with their defaults."""

    def load(state_dict: dict[str, Any], url: str) -> int:
        report = dcp.load(state_dict, checkpoint_id=url)
        if report.missing:
            raise RuntimeError(f"{url} lacks {report.missing[:3]}")
        return int(report.bytes_read)

    def save(state_dict: dict[str, Any], url: str) -> None:
        dcp.save(state_dict, checkpoint_id=url)

    return ObjectSide("ours", save, load)


def stock_side(threads: int = 1) -> ObjectSide:
    """Return torch's `FsspecWriter` and `FsspecReader`, which use s3fs.

    ``sync_files=False``, because torch would sync all disks of the machine.
    """

    def save(state_dict: dict[str, Any], url: str) -> None:
        writer = FsspecWriter(url, sync_files=False, thread_count=threads)
        stock.save(state_dict, storage_writer=writer, no_dist=not dist.is_initialized())

    def load(state_dict: dict[str, Any], url: str) -> None:
        stock.load(state_dict, storage_reader=FsspecReader(url), no_dist=not dist.is_initialized())

    return ObjectSide("stock" if threads == 1 else f"stock_{threads}_threads", save, load)


def connector_side(service: S3Service) -> ObjectSide | None:
    """Return `S3StorageWriter` and `S3StorageReader` of s3torchconnector, or None if not installed."""
    try:
        storages = import_module("s3torchconnector.dcp")
    except ImportError:
        return None
    client_module = import_module("s3torchconnector._s3client")
    config = import_module("s3torchconnector").S3ClientConfig(force_path_style=True)

    def pointed(storage: Any) -> Any:
        # Its constructors take no endpoint.
        client = client_module.S3Client(service.region, endpoint=service.endpoint_url, s3client_config=config)
        storage.fs._client = client
        return storage

    def save(state_dict: dict[str, Any], url: str) -> None:
        writer = pointed(storages.S3StorageWriter(service.region, url, s3client_config=config))
        stock.save(state_dict, storage_writer=writer, no_dist=not dist.is_initialized())

    def load(state_dict: dict[str, Any], url: str) -> None:
        reader = pointed(storages.S3StorageReader(service.region, url, s3client_config=config))
        stock.load(state_dict, storage_reader=reader, no_dist=not dist.is_initialized())

    return ObjectSide("s3torchconnector", save, load)
