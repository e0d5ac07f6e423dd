"""Load a file as live caches, in one pass."""
