"""The values of stored tensors without torch: read as numpy arrays, summed up, compared.

What indexes alone tell is one folder up.
"""
