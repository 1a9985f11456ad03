"""Plug-ins of trainers: each module is for one framework, imports it, and is imported by its user alone."""
