"""The process writer: saves carried out by a process of their own, and its talk with the trainer.

What thread and process writers share is one folder up.
"""
