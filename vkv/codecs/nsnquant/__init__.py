"""Codec `nsnquant`: Hadamard transform, then vector quantization."""
