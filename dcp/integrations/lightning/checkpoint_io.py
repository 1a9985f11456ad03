"""`DcpCheckpointIO`: a plug-in for one process and DDP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from dcp.errors import OptionError
from dcp.integrations.lightning.exact_values import opened, sealed
from dcp.integrations.lightning.loading import is_of_lightning, newest_good
from dcp.integrations.lightning.names import BEFORE_REQUEUE
from dcp.integrations.path_saves import Mode, PathSaves
from dcp.manager.catalog.registration import CatalogRegistration
from dcp.state_dict_loader import read

__all__ = ["BYPASSED", "DcpCheckpointIO"]

BYPASSED = (
    "ModelParallelStrategy and FSDPStrategy never ask a CheckpointIO for sharded checkpoints: "
    "DcpCheckpointIO does nothing here. Use "
    "Trainer(strategy=DcpModelParallelStrategy(...)) without the plug-in"
)

_Path = str | os.PathLike[str]
_ON_CPU: Any = "cpu"


class DcpCheckpointIO(CheckpointIO):
    """Checkpoints of the Trainer as folders of dcp's: written behind the training, committed in one step,
    compared with their checksums when they are loaded::

        trainer = Trainer(plugins=[DcpCheckpointIO()])

    All that Lightning saves comes back as it was, on the CPU. A checkpoint that ModelCheckpoint replaces is
    deleted once the newer one is committed. With ``ckpt_path="last"`` a damaged or half-written one is passed
    over for the newest good one beside it. Files that Lightning wrote itself are loaded as before.

    Args:
        mode: "thread" and "process" copy the state and write the copy in a thread, or in a process of its
            own; "sync" writes before training goes on.
        storage_options: For paths such as ``s3://bucket/run``, as for `dcp.save`.
        catalog: As for `dcp.CheckpointManager`; a run is a folder of checkpoints.

    Raises:
        OptionError: ``mode`` is none of these, or ``catalog`` no URL.
        ModuleNotFoundError: ``catalog`` needs httpx, which is not there.
    """

    def __init__(
        self,
        *,
        mode: Mode = "thread",
        storage_options: Mapping[str, Any] | None = None,
        catalog: str | CatalogRegistration | None = None,
    ) -> None:
        self._saves = PathSaves(mode, storage_options, catalog, no_dist=True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _Path, storage_options: Any | None = None
    ) -> None:
        """Save, on the rank that calls it alone. Returns when the state is copied.

        Args:
            checkpoint: What Lightning dumps: any nested dict.
            path: A folder, or its URL; what is there is replaced by the commit.
            storage_options: None: they are given to the plug-in.

        Raises:
            OptionError: The path is a file, or there are ``storage_options``.
            CheckpointError: What an earlier save raised.
        """
        if storage_options is not None:
            raise OptionError("give storage_options to DcpCheckpointIO, which needs them to load as well")
        if os.path.isfile(path):  # noqa: PTH113 - may be a URL
            raise OptionError(
                f"{path} is a file that Lightning wrote, and a checkpoint of dcp is a folder: give "
                "ModelCheckpoint another dirpath. ckpt_path= may still name the file"
            )
        self._saves.begin(sealed(checkpoint), path, step=checkpoint.get("global_step"))
        if os.path.basename(path).startswith(BEFORE_REQUEUE):  # noqa: PTH119
            self.wait()

    def load_checkpoint(
        self, path: _Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint. All ranks of the process group have to call it alike.

        Args:
            path: What was saved, or a file of Lightning's.
            map_location: The device of the tensors; the CPU without it.
            weights_only: False allows values of any class, whose pickles may run code.

        Raises:
            CheckpointNotFoundError: Nothing is committed there.
            CorruptCheckpointError: Bytes are not those that were committed.
            UnsafeObjectError: A value needs ``weights_only=False``.
            OptionError: ``map_location`` is no device.
        """
        if is_of_lightning(path):
            return TorchCheckpointIO().load_checkpoint(os.fspath(path), map_location or _ON_CPU, weights_only)
        if not (map_location is None or isinstance(map_location, str | torch.device)):
            raise OptionError(f"map_location must be one device, not {map_location!r}")
        self.wait()
        options = self._saves.storage_options

        def whole(path: _Path) -> dict[str, Any]:
            device = map_location or "cpu"
            return opened(read(path, device=device, weights_only=weights_only, storage_options=options))

        return newest_good(path, whole, options)

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete it once all saves that were begun before are committed; where one has failed it stays."""
        if os.path.isdir(path) and is_of_lightning(path):  # noqa: PTH112
            rank_zero_warn(BYPASSED)
            TorchCheckpointIO().remove_checkpoint(os.fspath(path))
            return
        self._saves.remove(path)

    def wait(self) -> None:
        """Return when all is committed; raises what a save raised."""
        self._saves.wait()

    def teardown(self) -> None:
        """`wait`, at the end of the Trainer's work."""
        self._saves.close()
