"""Plans as columns, as bytes between ranks, and as torch's objects.

How ranks exchange them is `dcp.ranks`.
"""
