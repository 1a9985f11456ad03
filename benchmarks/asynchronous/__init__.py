"""What training waits for: asynchronous saves, training loops, staging from a device."""
