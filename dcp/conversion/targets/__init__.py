"""Target layouts, one module for each format: the position of every output byte, before any data is copied.

`dcp.conversion.layout` has the parts of layouts; `dcp.storage.formats` defines the formats.
"""
