"""Names of ``torch.distributed.checkpoint.format_utils``, implemented by dcp's conversions.

``python -m dcp.format_utils MODE SRC DST`` takes torch's arguments. A missing source is an error with exit
status 2; torch prints a line and exits with status 0.
"""

import argparse
import os
from pathlib import Path

from dcp.calls.torch_names import names_of
from dcp.conversion.run import convert
from dcp.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from dcp.storage.torch_storage.foreign_readers import BroadcastingTorchSaveReader

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]

globals()["__getattr__"] = names_of("format_utils")


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Plan the load of a torch.save file, as in torch::

        dcp.load( state_dict, storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner(),
        checkpoint_id="model.pt", )

    torch's planner takes shapes and dtypes from the state dict. This planner reads the index of the file, so
    mismatches raise named errors, and values other than tensors load too.
    """


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Convert a sharded checkpoint to one file for `torch.load`, in constant memory.

    Replaces an existing file and restores the saved nesting, as torch does. Values are never unpickled:
    objects of unknown classes raise PlanError. `dcp.convert` can omit these objects. Other errors are those
    of `dcp.convert`.
    """
    convert(dcp_checkpoint_dir, torch_save_path, to="torch", overwrite=True)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Convert a torch.save file to a checkpoint for torch and dcp, in constant memory.

    Replaces an existing checkpoint in one step. Values are never unpickled, as for `dcp_to_torch_save`.
    """
    convert(torch_save_path, dcp_checkpoint_dir, to="dcp", overwrite=True)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dcp.format_utils", description="Convert a checkpoint.")
    parser.add_argument("mode", choices=["torch_to_dcp", "dcp_to_torch"])
    parser.add_argument("src", type=Path, help="torch.save file, or folder of a sharded checkpoint")
    parser.add_argument("dst", type=Path, help="target: a folder, or a torch.save file")
    arguments = parser.parse_args()
    if arguments.mode == "torch_to_dcp":
        if not arguments.src.is_file():
            parser.error(f"src: no torch.save file at {arguments.src}")
        torch_save_to_dcp(arguments.src, arguments.dst)
    else:
        if not arguments.src.is_dir():
            parser.error(f"src: no checkpoint folder at {arguments.src}")
        dcp_to_torch_save(arguments.src, arguments.dst)
    print(f"{arguments.src} -> {arguments.dst}")


if __name__ == "__main__":
    _main()
