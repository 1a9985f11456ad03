"""A load: what is filled, the engine that reads it on columns, and what it reports.

The door is `dcp.state_dict_loader`; plans made of torch's objects are in `dcp.engines`.
"""
