"""Which boxes of which tensors a rank holds, and where they lie in its memory.

Nothing here knows whether they are saved or loaded.
"""
