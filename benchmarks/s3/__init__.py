"""Saves and loads on an S3 server.

The server is started by `dcp.demo.s3_server`; what a disk does is measured one folder up.
"""
