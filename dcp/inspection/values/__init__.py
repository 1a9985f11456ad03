"""Values of stored tensors without torch: read as numpy arrays, summarized, compared.

The parent package works on indexes alone.
"""
