"""Saves on columns: plan, write and commit the state of all ranks.

`dcp.state_dict_saver` has the public functions; `dcp.engines` handles torch's plan objects.
"""
