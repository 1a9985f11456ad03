"""Bytes of checkpoints for requests: open checkpoints, and streamed answers."""
