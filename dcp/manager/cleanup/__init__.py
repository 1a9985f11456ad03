"""Deletions of a manager: retention rules, removal that no crash tears, leftovers of killed saves.

Which steps there are is known one folder up.
"""
