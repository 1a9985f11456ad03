"""The command line: one module per command, all of them without torch."""

from dcp.cli.app import main

__all__ = ["main"]
