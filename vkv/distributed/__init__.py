"""Ranks of one model: votes, and bytes that travel between them through ``mx.distributed``."""
