"""From a place to an index: which format is there, and which of several indexes is the truth.

What one file says is read by its format's own folder.
"""
