"""Plans as columns, as bytes between ranks, and as torch's objects."""
