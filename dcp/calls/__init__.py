"""What the doors share: arguments, the choice of a storage, errors as callers see them, torch's other names.

Nothing here plans, reads or writes.
"""
