"""Generate docs/reference/generated from the code: command line, REST API, settings, metrics, errors.

``python -m tools.reference`` writes the pages; with ``--check`` it fails if one is stale.
"""
