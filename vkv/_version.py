"""The version of the package. The format has a version of its own: ``vkv.header.VERSION``."""

__version__ = "0.1.0"
