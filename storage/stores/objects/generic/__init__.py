"""Any fsspec file system as an object service, and what its errors mean.

S3 has a client of its own beside this; folders, handles, repetition and conditions are one folder up.
"""
