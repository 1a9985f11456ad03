"""One module for each subcommand of ``dcp``: its options, and what it prints.

What it finds out is a function of the library. `conversion`, `removal` and `service` have what belongs
together.
"""
