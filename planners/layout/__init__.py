"""Boxes of tensors that a rank holds, and their places in its memory.

Saves and loads share it.
"""
