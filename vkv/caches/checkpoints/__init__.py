"""Checkpoints: the state of caches that cannot be cut, kept at earlier points of a prompt."""
