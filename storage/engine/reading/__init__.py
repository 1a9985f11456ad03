"""Reading many ranges of many files into many places: requests, joined, checked and scattered by workers."""
