"""For tests of others: whether a save and a load keep what they are given. Imported only on use.

`dcp.testing.parallelism` tries a model under its parallelism; it needs torch, and no test framework.
"""
