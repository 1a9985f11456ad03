"""Inspection: list checkpoints, read their contents, and verify their bytes. Does not import torch.

Functions here read indexes only, except verification, which reads everything; `values` reads tensor values.
Functions return data classes for the command line and the service.
"""
