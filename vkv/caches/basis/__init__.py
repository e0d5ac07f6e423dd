"""Learn the axes of `tc` once per model."""
