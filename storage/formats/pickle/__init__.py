"""Pickles read without running them, and values written as pickles.

What torch makes of pickles is in `dcp.storage.formats.torch`.
"""
