"""The client for asyncio and trio.

What both clients share is in the folder above.
"""
