"""What several kinds of jobs have in common: subjects, targets, parameters, renaming, deletion.

A kind itself is a module of `dcp.server.jobs.kinds`.
"""
