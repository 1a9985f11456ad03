"""Bodies of answers, and how they are sent: ranges, entity tags, bytes that are made while they are read.

What an answer is about, and what opens a checkpoint for it, is one folder up.
"""
