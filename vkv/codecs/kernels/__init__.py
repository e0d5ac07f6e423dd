"""Kernels that several codecs share, and the device they run on."""
