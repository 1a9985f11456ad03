"""Engines of saves and loads: selection of an engine, and torch's protocol.

dcp's planners and storages work on columns (`dcp.saving`, `dcp.loading`). A planner or storage that overrides
a step receives torch's plan objects and the documented calls.
"""
