"""Kinds of jobs, one module each. What several of them need is in `shared`."""
