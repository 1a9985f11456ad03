"""Saves and loads by torch's protocol: plans made of objects, for planners and storages that override a step.

Our own planners and storages work on columns, in `dcp.saving` and `dcp.loading`.
"""
