"""Index arithmetic, and nothing else: boxes of tensors, strides, ragged columns, the bytes of a payload that
a box has. Nothing here opens a file or touches a tensor; what is planned and read by it lies elsewhere.
"""
