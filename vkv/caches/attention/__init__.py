"""Attend to the codes of packed caches."""
