"""Stored tensors as MLX arrays, and arrays as bytes to store, on a CPU and on an NVIDIA GPU."""
