"""What the service knows of checkpoints, as rows: SQL and values. All of it takes a `Connection` first.

How lists of checkpoints are found is in `queries`, what is inside of one in `contents`, what people say of it
in `labelling`. Nothing here opens a file or knows of HTTP.
"""
