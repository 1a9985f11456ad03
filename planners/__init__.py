"""Who writes and reads which box: the planners, and the columns that plans are made of."""
