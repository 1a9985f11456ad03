"""Tools for tests of trainers: check that a save and a load keep a model. Imported only on use.

`dcp.testing.parallelism` tries a model under its parallelism; it needs torch, and no test framework.
"""
