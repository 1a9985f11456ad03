"""Tasks, each a range of one target file: read, copied, checked and written, by whatever executor.

Which bytes go where was planned by `dcp.conversion.layouts`; the finished target is made visible by
`dcp.conversion.publishing`.
"""
