"""Benchmarks of conversions by dcphub and by stock torch, including the saves of the source checkpoints."""
