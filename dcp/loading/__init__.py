"""Loads on columns: plan, read and report.

`dcp.state_dict_loader` has the public functions; `dcp.engines` handles torch's plan objects.
"""
