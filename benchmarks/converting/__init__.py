"""Conversions, ours and stock's."""
