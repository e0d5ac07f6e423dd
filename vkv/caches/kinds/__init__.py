"""One module per kind of mlx-lm cache: taken apart, made again, and cut."""
