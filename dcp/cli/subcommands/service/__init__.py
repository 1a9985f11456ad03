"""The subcommands of the service: it and its workers, its database, and its keys and roots.

What they do is in `dcp.server`, which nothing else of the command line imports.
"""
