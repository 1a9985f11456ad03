"""Object stores: S3 and whatever else fsspec reaches, behind the store interface.

`store` has what all have in common; `s3` and `filesystem` say how one request is made, and `requests` repeats
what fails in passing. Imports no torch, and s3fs only when an ``s3://`` store makes its first request.
"""
