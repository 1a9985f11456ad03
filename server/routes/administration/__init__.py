"""Routes of those who run the service: keys, webhooks, rules, retention, the audit log, health and metrics.

Everyone else's are in the folders beside this one.
"""
