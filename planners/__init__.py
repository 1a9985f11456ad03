"""Planners: decide which rank writes and reads which box, as columns.

Plans are values; nothing here reads files or communicates.
"""
