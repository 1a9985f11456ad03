"""What is drawn of a checkpoint, in as many cells as can be seen: matrices, phases of a save, who holds what.

Numbers and no pictures: these are made of them by pages.
"""
