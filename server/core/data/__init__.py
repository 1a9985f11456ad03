"""The bytes of checkpoints on their way to a client: tensors, slices, files, and what is made of them.

Everything that opens a checkpoint to answer a request is here; what the catalog remembers of one is not.
"""
