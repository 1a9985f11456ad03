"""Object stores: S3 and whatever else fsspec reaches, behind the store interface.

`client` says what is asked of a service, one attempt at a time; `s3` and `generic` are the two clients.
`requests` repeats what fails in passing, and counts. `reading` and `writing` are the handles, `store` puts
them together. Imports no torch, and s3fs only when an ``s3://`` store makes its first request.
"""
