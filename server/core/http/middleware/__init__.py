"""What every request goes through before its route, from the outside in: plain ASGI, one module each.

What routes ask for by name is in `dcp.server.core.http.dependencies`.
"""
