"""The version of this package, which documents name as their writer."""

__version__ = "0.1.0"
