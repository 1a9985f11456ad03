"""Host memory for staged copies: how much there is, arenas, and who has which."""
