"""The command line: arguments, tables, errors as lines. Does not import torch.

Each command is a function that calls the library.
"""

from dcp.cli.app import main

__all__ = ["main"]
