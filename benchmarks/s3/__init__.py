"""Benchmarks of saves and loads on an S3 server, which `dcp.demo.s3_server` starts."""
