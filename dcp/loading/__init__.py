"""A load: what is filled, the engine that reads it on columns, and what it reports.

The doors are `dcp.state_dict_loader` and `dcp.loading.read`; plans made of torch's objects are in
`dcp.torch_protocol`.
"""
