"""Finding checkpoints below roots, and what the catalog keeps of each."""
