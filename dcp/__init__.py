"""Sharded checkpointing for PyTorch. ``import dcp`` is a drop-in for ``torch.distributed.checkpoint``."""
