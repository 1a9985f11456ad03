"""HTTP layer: authentication, errors as problem documents, idempotent POSTs.

Each module of `middleware` is a step before the route. Features define the operations.
"""
