"""Exchanges between ranks: bytes, outcomes, signs of life, and one error from the failures of many.

What the bytes mean is known to those who send them.
"""
