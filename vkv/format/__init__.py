"""The bytes of a .vkv file: container, header, rules, dependencies, byte account. No MLX."""
