"""JSON of keys, webhooks, rules, retention and the audit log.

All other resources are in the folder above.
"""
