"""Storages for fsspec URLs, under torch's names: `FsspecReader` and `FsspecWriter`.

Unlike `FileSystemReader` and `FileSystemWriter`, additional keyword arguments are options of the file
system.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec.utils import get_protocol
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcp.storage.engine.requests import Verify
from dcp.storage.stores.opening import OpenWith
from dcp.storage.torch_compat import VERSION
from dcp.storage.torch_storage.reader import FileSystemReader
from dcp.storage.torch_storage.writer import FileSystemWriter


class FsspecWriter(FileSystemWriter):
    """`FileSystemWriter` for a URL such as ``s3://bucket/prefix``, or a local path.

    Args:
        **kwargs: Storage options of fsspec (``endpoint_url``, ``key``, ``secret``, ``anon``,
            ``client_kwargs``, ...) and of `dcp.storage.stores.objects.store`. ``memory://`` is fsspec's
            memory file system.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        cache_staged_state_dict: bool = False,
        torch_compatible: bool = True,
        digests: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
            torch_compatible=torch_compatible,
            digests=digests,
            open_store=OpenWith(kwargs, through_fsspec=True),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if fsspec knows the scheme; a `Path` is never a URL."""
        return _is_known(checkpoint_id)


if VERSION >= (2, 15) and not TYPE_CHECKING:
    _Writer = FsspecWriter

    class FsspecWriter(_Writer):
        """`FileSystemWriter` for a URL, with torch's order of positional arguments."""

        def __init__(
            self,
            path: str | os.PathLike[str],
            single_file_per_rank: bool = True,
            sync_files: bool = True,
            thread_count: int = 1,
            per_thread_copy_ahead: int = 10_000_000,
            cache_staged_state_dict: bool = False,
            overwrite: bool = True,
            _extensions: Sequence[Any] | None = None,
            serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
            **kwargs: Any,
        ) -> None:
            super().__init__(
                path,
                single_file_per_rank,
                sync_files,
                thread_count,
                per_thread_copy_ahead,
                overwrite,
                _extensions,
                serialization_format,
                cache_staged_state_dict=cache_staged_state_dict,
                **kwargs,
            )


class FsspecReader(FileSystemReader):
    """`FileSystemReader` of a URL such as ``s3://bucket/prefix``, or of a local path.

    Args:
        **kwargs: Storage options, as for `FsspecWriter`.

    Examples:
        dcp.load(state, storage_reader=dcp.FsspecReader("s3://bucket/step-100", anon=True))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "blocks",
        threads: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path, verify=verify, threads=threads, open_store=OpenWith(kwargs, through_fsspec=True)
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if fsspec knows the scheme; a `Path` is never a URL."""
        return _is_known(checkpoint_id)


def _is_known(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return True for a known scheme, without opening the file system, which may need credentials or a
    package.
    """
    if isinstance(checkpoint_id, Path):
        return False
    from fsspec import available_protocols

    return get_protocol(os.fspath(checkpoint_id)) in available_protocols()
