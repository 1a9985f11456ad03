"""The version of this package, readable without installed metadata."""

__version__ = "0.2.0"
