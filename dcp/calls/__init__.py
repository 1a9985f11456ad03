"""Parts that public functions share: arguments, the choice of a storage, short tracebacks, torch's other
names.

Nothing here plans, reads or writes.
"""
