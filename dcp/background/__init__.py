"""Saving behind the training loop: sessions, futures, and writers in a thread or a process of their own."""
