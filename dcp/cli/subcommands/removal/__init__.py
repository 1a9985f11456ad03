"""The subcommands that free space: ``rm`` removes checkpoints, ``prune`` parts of them, ``gc`` what killed
saves have left.
"""
