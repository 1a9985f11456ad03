"""What is in checkpoints, what is drawn and what was found out of it, and a state that is to fit one."""
