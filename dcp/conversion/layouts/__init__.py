"""A target before a byte moves: files, literal bytes, and the parts of the source that copies are made of.

How one format lays itself out is in `dcp.conversion.targets`.
"""
