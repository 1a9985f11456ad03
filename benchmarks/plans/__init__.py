"""Plans of saves and loads, first ones and again.

How long the writing and reading take is measured one folder up.
"""
