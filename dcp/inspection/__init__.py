"""Inspection: list checkpoints, read their contents, and verify their bytes. Does not import torch.

Functions in this package read indexes only, except verification, which reads every byte; `values` reads
tensor values. Functions return data classes for the command line and the service.
"""
