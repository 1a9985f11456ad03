"""The bytes of checkpoints on their way to a client: tensors, slices, files, and what is made of them."""
