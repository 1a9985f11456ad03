"""What ``torch.distributed.checkpoint.format_utils`` has: torch's own for now.

``python -m dcp.format_utils MODE SRC DST`` takes torch's arguments. A source that is not there is an error
(exit status 2); torch's prints a line and reports success.
"""

import argparse
from pathlib import Path

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from dcp.planners.dynamic_load_planner import DynamicMetaLoadPlanner
from dcp.storage.foreign_readers import BroadcastingTorchSaveReader

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


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
