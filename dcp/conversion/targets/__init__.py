"""Target layouts, one module for each format: the position of every output byte, before any data moves.

`dcp.conversion.layout` has the parts of layouts, `dcp.storage.formats` the meaning of the bytes.
"""
