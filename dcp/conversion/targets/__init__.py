"""Target layouts, one module a format: where every byte of the output goes, before any moves."""
