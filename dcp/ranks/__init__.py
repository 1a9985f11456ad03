"""Exchanges between ranks: bytes, outcomes, signs of life, and one error for the failures of several ranks."""
