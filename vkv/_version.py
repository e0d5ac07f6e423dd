"""Hold the version of the package. The format has its own: ``vkv.format.header.VERSION``."""

__version__ = "0.1.0"
