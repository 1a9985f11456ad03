"""The routes, one module a resource, each with a ``router``; `dcp.server.app` lists them."""
