"""The plan of the save before, used again while nothing has changed."""
