"""Formats of torch: stock's `.metadata` (`metadata`) and zip files of `torch.save`. Imports no torch.

`dcp.storage.formats.pickle` decodes pickles.
"""
