"""Conversions, ours and stock's.

The checkpoints that are converted are saved here, too; nothing else measures conversions.
"""
