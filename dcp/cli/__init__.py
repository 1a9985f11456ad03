"""The command line: arguments, tables, errors as lines. Without torch.

A command is a function; what it finds out is a function of the library.
"""

from dcp.cli.app import main

__all__ = ["main"]
