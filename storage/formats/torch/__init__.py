"""Formats that torch writes: stock's `.metadata` (`metadata`), and the zip files of `torch.save`. Imports no
torch.

Pickles in general are in `dcp.storage.formats.pickle`.
"""
