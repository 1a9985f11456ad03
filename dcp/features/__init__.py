"""What a load can do beside filling tensors, a file a feature; nothing of the core imports one.

`dcp.features.order` has all of them in their order.
"""
