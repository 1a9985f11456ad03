"""Train, kill, resume and reshard a small model, and check every claim on the way: ``dcp demo``."""
