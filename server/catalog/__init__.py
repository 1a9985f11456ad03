"""What the service knows of checkpoints: SQL, and values. All of it takes a `Connection` first."""
