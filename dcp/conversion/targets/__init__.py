"""Target layouts, one module a format: where every byte of the output goes, before any moves.

What layouts are made of is in `dcp.conversion.layout`; what a format's bytes mean, in `dcp.storage.formats`.
"""
