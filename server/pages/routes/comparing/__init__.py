"""Pages that compare: two checkpoints, the steps of a run, a checkpoint with the state that is to take it."""
