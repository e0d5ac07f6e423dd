"""vkv: a file format and store for the KV caches of language models on MLX."""
