"""Demo: train, kill, resume and reshard a small model, and check every claim (``dcp demo``)."""
