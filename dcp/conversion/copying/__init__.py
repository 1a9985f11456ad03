"""Tasks, each a range of one target file: read, copied, checked and written, by whatever executor."""
