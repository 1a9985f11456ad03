"""Host memory for staged copies: how much there is, arenas, and who has which.

What is copied there is said by `dcp.staging.layout`.
"""
