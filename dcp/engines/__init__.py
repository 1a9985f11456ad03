"""Engines of saves and loads: the choice between columns and torch's protocol, that protocol, and the run.

Our own planners and storages work on columns, in `dcp.saving` and `dcp.loading`. A planner or storage that
overrides a step gets torch's objects: plans that are made of them, and a call of each step that torch
documents.
"""
