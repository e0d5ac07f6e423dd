"""Sources: where bytes come from (a local file, memory, http, fsspec). No MLX."""
