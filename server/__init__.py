"""The service: a catalog of checkpoints with jobs. The API process never imports torch.

`app` assembles the application of `core`, `catalog` and `features`; `serving` runs the processes.
"""
