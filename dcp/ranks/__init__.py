"""Exchanges between ranks: bytes, outcomes, signs of life, and one error for several failures."""
