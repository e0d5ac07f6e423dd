"""Live mlx-lm caches: taken apart, planned into a file, and made again."""
