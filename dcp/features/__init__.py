"""What a save or load can do beside moving tensors, a file a feature; nothing of the core imports one."""
