"""Common parts of public functions: arguments, choice of a storage, short tracebacks, torch's undocumented
names.
"""
