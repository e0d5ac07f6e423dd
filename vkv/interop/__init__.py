"""Files of mlx-lm 0.24 to 0.32, and its save and load functions over vkv files."""
