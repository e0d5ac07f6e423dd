"""Live caches that hold the compressed bytes."""
