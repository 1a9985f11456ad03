"""The routes, one module a resource, each with a ``router``; `dcp.server.app` lists them.

A route reads its request, calls what does the work, and answers; what goes in and out is declared in
`dcp.server.schemas`.
"""
