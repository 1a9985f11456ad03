"""JSON of keys, webhooks, rules, retention and the audit log.

What is in checkpoints is in `contents`, all other resources are in the folder above.
"""
