"""Live mlx-lm caches: saved, loaded, packed, resumed."""
