"""What torch writes: stock's `.metadata` (`metadata`), and the zip files of `torch.save`. Imports no torch.

What a pickle is, whoever wrote it, is in `dcp.storage.formats.pickle`.
"""
