"""The client that waits for its answers.

What both clients share is in the folder above.
"""
