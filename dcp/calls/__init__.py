"""What saves and loads share at the door: arguments, the choice of a storage, errors as the caller sees them.

Nothing here plans, reads or writes.
"""
