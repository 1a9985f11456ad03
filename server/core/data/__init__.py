"""The bytes of checkpoints for requests: open checkpoints, and
answers whose bodies are read while they are sent."""
