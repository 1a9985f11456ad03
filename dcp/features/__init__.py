"""Features of saves and loads, one module each. The core, which moves tensors, does not import them."""
