"""Who writes and reads which box: the planners, and the columns that plans are made of.

Plans are values: nothing here reads or writes a file, or talks to another rank.
"""
