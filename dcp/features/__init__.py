"""Features of saves and loads beside moving tensors, a file each; the core imports none."""
