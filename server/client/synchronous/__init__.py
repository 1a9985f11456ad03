"""The client that waits for its answers, made of `asynchronous` by ``make sync-client``: edit that one.

What both clients share is in the folder above.
"""
