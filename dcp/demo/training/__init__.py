"""What of the demo runs with torch: a training job that is killed, and stock torch, which loads its saves.

The story around them starts these as processes, and needs no torch itself.
"""
