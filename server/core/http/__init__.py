"""Shared parts of all requests: who asks and may, errors as problem documents, a POST that is done once.

Each module of `middleware` is a step before the route. What is asked for is in features.
"""
