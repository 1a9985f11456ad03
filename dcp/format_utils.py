"""Names of ``torch.distributed.checkpoint.format_utils``, on our conversion engine.

``python -m dcp.format_utils MODE SRC DST`` takes torch's arguments. A source that is not there is an error
(exit status 2); torch's prints a line and reports success.
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
    """Plans the load of a torch.save file, as torch's example has it::

        dcp.load(
            state_dict,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
            checkpoint_id="model.pt",
        )

    torch's planner takes shapes and dtypes from the state dict, because its reader has read nothing yet. Ours
    reads the file's own index first, so that this is `DefaultLoadPlanner`: what does not fit is an error that
    names it, and values other than tensors load.
    """


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Write a sharded checkpoint as one file for `torch.load`, in memory of a few buffers.

    As torch's, it replaces a file that is there, and restores the nesting that the checkpoint records. Other
    than torch's it unpickles nothing: values that need code are a PlanError which names them
    (`dcp.convert` can leave them out). Errors are those of `dcp.convert`.
    """
    convert(dcp_checkpoint_dir, torch_save_path, to="torch", overwrite=True)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Write a torch.save file as a checkpoint that torch's and our `load` read, in memory of a few buffers.

    As torch's, it replaces a checkpoint that is there (in one step). Other than torch's it unpickles nothing,
    as `dcp_to_torch_save`.
    """
    convert(torch_save_path, dcp_checkpoint_dir, to="dcp", overwrite=True)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dcp.format_utils", description="Convert a checkpoint.")
    parser.add_argument("mode", choices=["torch_to_dcp", "dcp_to_torch"])
    parser.add_argument("src", type=Path, help="torch.save file, or folder of a sharded checkpoint")
    parser.add_argument("dst", type=Path, help="what to write: a folder, or a torch.save file")
    arguments = parser.parse_args()
    if arguments.mode == "torch_to_dcp":
        if not arguments.src.is_file():
            parser.error(f"no torch.save file at {arguments.src}")
        torch_save_to_dcp(arguments.src, arguments.dst)
    else:
        if not arguments.src.is_dir():
            parser.error(f"no checkpoint folder at {arguments.src}")
        dcp_to_torch_save(arguments.src, arguments.dst)
    print(f"{arguments.src} -> {arguments.dst}")


if __name__ == "__main__":
    _main()
