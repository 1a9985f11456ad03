"""Which ranges of a file are read together: neighbours, clusters of small runs, requests to a service.

Pure: nothing here reads a byte.
"""
