"""Trainer plug-ins: one module per framework, imported by the user."""
