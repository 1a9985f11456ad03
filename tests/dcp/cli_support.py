"""The same as `tests.command_line.cli_support`, for the tests that still look for it here."""

from tests.command_line.cli_support import Outcome, data_file, flip, run, save_ours, save_stock, state

__all__ = ["Outcome", "data_file", "flip", "run", "save_ours", "save_stock", "state"]
