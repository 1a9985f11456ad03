"""The service: a catalog of checkpoints, and jobs on them. Never imports torch in the API process."""
