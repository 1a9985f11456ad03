"""Reading many ranges of many files into many places: requests, joined, checked and scattered by workers.

Which ranges are wanted is said by those who ask; how ranges are written is `dcp.storage.engine.write`.
"""
