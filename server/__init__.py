"""The service: a catalog of checkpoints, and jobs on them. Never imports torch in the API process.

Here is what all of it shares: the application (`app`), the settings, the roots and the errors. Everything
else has a folder: requests enter by `http` and `routes`, which use `catalog`, `data` and `jobs`.
"""
