"""Plug-ins of trainers: each module is one framework's, imports it, and is imported by its user alone."""
