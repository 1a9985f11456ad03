"""Proofs that a model has now what a checkpoint has: names, types, digests, values; on any mesh.

`prove` compares what a save would take with the checkpoint's index. Nothing is written, and nothing changed.
"""
