"""Index arithmetic: boxes of tensors, strides, ragged columns, and byte ranges of boxes. No I/O, no
tensors.
"""
