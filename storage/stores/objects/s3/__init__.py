"""S3 as an object service: sessions, requests past botocore, and what its errors mean.

Folders, handles, repetition and conditions are those of all object stores, one folder up.
"""
