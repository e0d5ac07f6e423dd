"""Codecs turn tensors of a cache into stored parts and back. No codec knows a file or a URL."""
