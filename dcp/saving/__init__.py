"""A save: what a rank has, and the engine that plans, writes and commits it on columns.

The door is `dcp.state_dict_saver`; plans made of torch's objects are in `dcp.engines`.
"""
