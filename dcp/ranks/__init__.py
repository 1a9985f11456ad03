"""What ranks say to each other: bytes, outcomes, who is there, and one error from the failures of many.

What the bytes mean is known to those who send them.
"""
