"""Formats, the meaning of bytes: one folder a family of formats, and the index that all are read into.
Without torch.

Which bytes are fetched, and how, is `dcp.storage.engine`; where they are kept, `dcp.storage.stores`.
"""
