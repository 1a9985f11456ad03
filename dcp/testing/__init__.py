"""Test tools for trainers: check that saves and loads keep a model. Imported only on use.

`dcp.testing.parallelism` tests a model under its parallelism; torch is required, a test framework is not.
"""
