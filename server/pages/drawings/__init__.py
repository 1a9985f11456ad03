"""Pictures of tensors as coordinates for SVG in templates. Nothing is read here, and nothing is asked.

Lines and bars of the catalog's lists are in `dcp.server.pages.drawing`.
"""
