"""Planners, which decide who writes and reads which box, and the columns that plans are made of.

Plans are values: nothing here reads or writes a file, or talks to another rank.
"""
